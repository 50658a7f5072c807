#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "dist/sequence_shard.h"
#include "ops/recurrence.h"

namespace fox::ops {

/// A recurrence on some of its rows: `inputs` as it takes them, and the state to begin with in the options.
using Recurrence = std::function<RecurrenceResult(const std::vector<at::Tensor>& inputs, const RecurrenceOptions&)>;

/// A recurrence over a sequence that is split over ranks: chunk after chunk, each from the state that the one before it
/// left, which travels from rank to rank; gradients come back the other way. It takes as long as on one device, but
/// each rank holds its chunks only. Inputs in time (three dimensions at least) are (2B, T, ...) as dist::SequenceShard
/// lays them, all others belong to every chunk. Returns the outputs, (2B, T, ...). All ranks of the group call it
/// together, and their backward passes too. Differentiable in the inputs (once).
at::Tensor split_recurrence(const Recurrence& recurrence, const std::vector<at::Tensor>& inputs,
                            const std::shared_ptr<const dist::SequenceShard>& shard);

}  // namespace fox::ops
