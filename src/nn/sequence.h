#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "dist/sequence_shard.h"

namespace fox::nn {

/// A layer's memory of the tokens it has seen. Each mixer defines its own; a model::Cache holds one a layer.
struct CacheSlot {
  virtual ~CacheSlot() = default;
};

/// What a layer may show to someone who looks inside while it computes (gate analysis, the report).
struct Probe {
  virtual ~Probe() = default;
  /// q, k after norm and rotary; log_f undefined when the layer has no gate.
  virtual void on_attention(int64_t layer, const at::Tensor& q_BTHD, const at::Tensor& k_BTHD,
                            const at::Tensor& log_f_BTH) = 0;
};

/// How the tokens of a batch stand to one another. Default: B full rows from position 0.
struct Sequence {
  std::optional<at::Tensor> cu_seqlens;  ///< (N + 1,) int64, B = 1: packed documents
  std::optional<at::Tensor> seq_start;   ///< (B,) int64: left-padding tokens of each row (first chunk of a cache only)
  int64_t offset = 0;                    ///< tokens already in the cache: position of this batch's first token
  Probe* probe = nullptr;
  bool deterministic = false;  ///< backward adds up in a fixed order (always so on the CPU)
  /// Set where this batch is a rank's part of whole sequences: two chunks of each, as rows. Training only, no padding
  /// and no packed documents; every layer then talks to the other ranks, in the backward pass too.
  std::shared_ptr<const dist::SequenceShard> shard = nullptr;

  /// How many of this batch's `length` tokens are padding in each row: seq_start counts from the cache's first token.
  std::optional<at::Tensor> padding_of(int64_t length) const;
};

/// A learnt tensor and how training treats it.
struct Parameter {
  std::string name;       ///< published name, e.g. model.layers.0.attn.q_proj.weight
  at::Tensor tensor;      ///< leaf; float32 masters in training
  bool decay = true;      ///< weight decay applies (matrices, convolutions, embeddings; never biases and norms)
  bool trainable = true;  ///< false for what is stored with the weights but never learnt (fixed gates)
};
using Parameters = std::vector<Parameter>;

}  // namespace fox::nn
