#pragma once

#include <cstdint>

namespace fox::kernels {

template <class T>
struct TokenShiftParams {
  const T* x;                       ///< (B, T, H, D), D contiguous
  int64_t x_batch, x_time, x_head;  ///< its strides in elements
  const T* alpha;                   ///< (B, T, H), contiguous
  const T* prev;                    ///< (B, H, D), contiguous, or nullptr for 0
  const int64_t* cu_seqlens;        ///< num_documents + 1 boundaries in the only row, or nullptr
  const int64_t* seq_start;         ///< first token of each row, or nullptr
  int64_t batch, time, heads, dim, num_documents;
};

/// y (contiguous): y_t = α_t x_{t-1} + (1 - α_t) x_t. Before t = 0 stands prev; a document that begins later has 0
/// before it.
template <class T>
void token_shift(const TokenShiftParams<T>& p, T* y);

/// dx, dalpha (contiguous) and dprev (nullptr if not wanted) from dy (contiguous).
template <class T>
void token_shift_backward(const TokenShiftParams<T>& p, const T* dy, T* dx, T* dalpha, T* dprev);

}  // namespace fox::kernels
