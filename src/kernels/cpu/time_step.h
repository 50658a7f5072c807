#pragma once

#include <cstdint>

namespace fox::kernels {

/// Time steps softplus(logits + bias) of Mamba and Mamba-2 (ops/time_step.h).
template <class T>
struct TimeStepParams {
  const T* logits;  ///< rows × channels, each row contiguous
  int64_t stride;   ///< elements from row to row
  const T* bias;    ///< channels
  int64_t rows, channels;
};

/// dt (rows × channels, contiguous).
template <class T>
void time_step(const TimeStepParams<T>& p, T* dt);

/// From ddt (rows × channels, contiguous): dlogits, likewise, and dbias (channels). The same bits on any number of
/// threads.
template <class T>
void time_step_backward(const TimeStepParams<T>& p, const T* ddt, T* dlogits, T* dbias);

}  // namespace fox::kernels
