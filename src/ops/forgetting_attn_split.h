#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

#include "dist/sequence_shard.h"
#include "ops/forgetting_attn.h"

namespace fox::ops {

/// forgetting_attn over a sequence that is split over ranks: q (2B, Tc, H, D), k, v (2B, Tc, Hk, D) and log_f (2B, Tc,
/// H) are this rank's chunks of it as dist::SequenceShard lays them, and so is what comes back, o (2B, Tc, H, D). All
/// ranks of the group call it together, and their backward passes too. Options as there, but for seq_start and
/// cu_seqlens, which are refused. Differentiable in q, k, v and log_f (once).
///
/// With pruning what a rank need not see is not sent to it, and |O - O_dense| <= 2ε max|V| holds as in the unsplit
/// operator, though not the very same keys are left out. A log_f above 0 or NaN makes the whole output NaN on all ranks
/// alike instead of throwing on one of them, whom the others would wait for.
at::Tensor forgetting_attn_split(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::optional<at::Tensor>& log_f, const ForgettingAttnOptions& options,
                                 const std::shared_ptr<const dist::SequenceShard>& shard);

}  // namespace fox::ops
