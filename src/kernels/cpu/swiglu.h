#pragma once

#include <cstdint>

namespace fox::kernels {

/// What SwiGLU reads: gate and value, rows × width, each row contiguous, so many elements from row to row.
template <class T>
struct SwigluParams {
  const T *gate, *value;
  int64_t gate_stride, value_stride;
  int64_t rows, width;
};

/// out (rows × width, contiguous) = silu(gate) * value.
template <class T>
void swiglu(const SwigluParams<T>& p, T* out);

/// Gradients, rows `stride` elements apart.
template <class T>
struct SwigluGradients {
  T *gate, *value;
  int64_t stride;
};

/// From dout (rows × width, contiguous).
template <class T>
void swiglu_backward(const SwigluParams<T>& p, const T* dout, const SwigluGradients<T>& gradients);

}  // namespace fox::kernels
