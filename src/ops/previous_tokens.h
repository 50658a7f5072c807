#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "dist/sequence_shard.h"

namespace fox::ops {

/// What stands before each chunk of a sequence that is split over ranks: given each chunk's last tokens, (2B, N, ...),
/// those of the chunk before it; 0 before the first. All ranks of the group call it together, and their backward passes
/// too. Differentiable.
at::Tensor previous_tokens(const at::Tensor& last_BN, const std::shared_ptr<const dist::SequenceShard>& shard);

}  // namespace fox::ops
