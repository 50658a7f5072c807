#pragma once

#include <cstdint>

namespace fox::kernels {

template <class T>
struct SwigluParams {
  const T* gate_up;        ///< rows × 2 width, each row contiguous
  int64_t gate_up_stride;  ///< elements from row to row
  int64_t rows, width;
};

/// out (rows × width, contiguous) = silu(g) * y.
template <class T>
void swiglu(const SwigluParams<T>& p, T* out);

/// d_gate_up (rows × 2 width, contiguous) from dout (rows × width, contiguous).
template <class T>
void swiglu_backward(const SwigluParams<T>& p, const T* dout, T* d_gate_up);

}  // namespace fox::kernels
