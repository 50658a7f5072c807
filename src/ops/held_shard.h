#pragma once

#include <memory>

#include "dist/sequence_shard.h"
#include "ops/common.h"

/// How a function of autograd keeps the ranks that it talked to in its forward pass for its backward pass.
namespace fox::ops {

struct HeldShard : torch::CustomClassHolder {
  explicit HeldShard(std::shared_ptr<const dist::SequenceShard> held) : shard(std::move(held)) {}
  std::shared_ptr<const dist::SequenceShard> shard;
};

inline void hold_shard(torch::autograd::AutogradContext* ctx, const std::shared_ptr<const dist::SequenceShard>& shard) {
  ctx->saved_data["shard"] = c10::IValue::make_capsule(c10::make_intrusive<HeldShard>(shard));
}

inline std::shared_ptr<const dist::SequenceShard> held_shard(const torch::autograd::AutogradContext* ctx) {
  return static_cast<HeldShard*>(ctx->saved_data.at("shard").toCapsule().get())->shard;
}

}  // namespace fox::ops
