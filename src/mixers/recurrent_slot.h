#pragma once

#include "nn/sequence.h"
#include "nn/short_conv.h"
#include "ops/split_recurrence.h"

namespace fox::mixers {

/// What a recurrent layer remembers: its state, and the last inputs of its short convolutions. Both have the same size
/// however many tokens were seen.
struct RecurrentSlot final : nn::CacheSlot {
  at::Tensor state;                     // undefined before the first token
  std::vector<nn::ShortConvTail> conv;  // one a convolution
};

/// Runs the recurrence on its inputs from the slot's state (none when training), and leaves the new one there. Inputs
/// in time have three dimensions at least.
inline at::Tensor run_recurrence(const nn::Sequence& sequence, RecurrentSlot* slot,
                                 const std::vector<at::Tensor>& inputs, const ops::Recurrence& recurrence) {
  if (sequence.shard) return ops::split_recurrence(recurrence, inputs, sequence.shard);
  ops::RecurrenceOptions options;
  options.cu_seqlens = sequence.cu_seqlens;
  options.seq_start = sequence.padding_of(inputs[0].size(1));
  if (slot && slot->state.defined()) options.initial_state = slot->state;
  const ops::RecurrenceResult result = recurrence(inputs, options);
  if (slot) slot->state = result.state;
  return result.o;
}

}  // namespace fox::mixers
