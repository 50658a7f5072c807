#pragma once

#include <cstdint>

namespace fox::kernels {

/// log_f[r, h] = log σ(logits[r, h] + bias[h]); everything contiguous, bias may be nullptr.
template <class T>
void log_sigmoid_gate(const T* logits, const T* bias, T* log_f, int64_t rows, int64_t heads);

/// dlogits = dlog_f (1 - f), and its sum over the rows in dbias (heads,) unless that is nullptr.
template <class T>
void log_sigmoid_gate_backward(const T* dlog_f, const T* log_f, T* dlogits, T* dbias, int64_t rows, int64_t heads);

}  // namespace fox::kernels
