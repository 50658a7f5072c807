#pragma once

#include "nn/sequence.h"
#include "nn/short_conv.h"
#include "ops/recurrence.h"

namespace fox::mixers {

/// What a recurrent layer remembers: its state, and the last inputs of its short convolutions. Both have the same size
/// however many tokens were seen.
struct RecurrentSlot final : nn::CacheSlot {
  at::Tensor state;                     // undefined before the first token
  std::vector<nn::ShortConvTail> conv;  // one a convolution
};

/// Runs `op(options)` → RecurrenceResult from the slot's state (none when training), and leaves the new one there.
template <typename Op>
at::Tensor run_recurrence(const nn::Sequence& sequence, int64_t length, RecurrentSlot* slot, const Op& op) {
  ops::RecurrenceOptions options;
  options.cu_seqlens = sequence.cu_seqlens;
  options.seq_start = sequence.padding_of(length);
  if (slot && slot->state.defined()) options.initial_state = slot->state;
  const ops::RecurrenceResult result = op(options);
  if (slot) slot->state = result.state;
  return result.o;
}

}  // namespace fox::mixers
