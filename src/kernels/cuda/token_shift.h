#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// As kernels/cpu/token_shift.h; T: __nv_bfloat16, __half, float, double.
template <class T>
struct TokenShiftParams {
  const T* x;                       ///< (B, T, H, D), D contiguous
  int64_t x_batch, x_time, x_head;  ///< its strides in elements
  const T* alpha;                   ///< (B, T, H), contiguous
  const T* prev;                    ///< (B, H, D), contiguous, or nullptr for 0
  const bool* begins;               ///< (B, T): a document begins at t > 0, so 0 stands before it; or nullptr
  int64_t batch, time, heads, dim;
};

template <class T>
cudaError_t token_shift(const TokenShiftParams<T>& p, T* y, cudaStream_t stream);

/// dx, dalpha (contiguous) and dprev (contiguous, or nullptr) from dy (contiguous).
template <class T>
cudaError_t token_shift_backward(const TokenShiftParams<T>& p, const T* dy, T* dx, T* dalpha, T* dprev,
                                 cudaStream_t stream);

}  // namespace fox::cuda
