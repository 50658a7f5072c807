#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// As kernels/cpu/rms_norm.h. T: __nv_bfloat16, __half, float, double; A: float, or double for double.
template <class T, class A>
struct RmsNormParams {
  const T* x;             ///< rows × (groups · width), each row contiguous
  int64_t x_stride;       ///< elements from row to row
  const A* weight;        ///< or nullptr for 1
  int64_t weight_stride;  ///< elements from group to group: width, or 0 where the groups share one weight
  int64_t rows, groups, width;
  A eps;
};

template <class T, class A>
cudaError_t rms_norm(const RmsNormParams<T, A>& p, T* y, cudaStream_t stream);

/// Rows of `partial` that rms_norm_backward wants.
template <class T, class A>
int64_t rms_norm_backward_partials(const RmsNormParams<T, A>& p);

/// dx (contiguous) from dy (contiguous). partial (rms_norm_backward_partials() × (groups · width)), unless nullptr,
/// gets partial sums of dy * x / rms(x): their sum over its rows (and over the groups, where these share a weight) is
/// the weight's gradient. No atomics: the same bits every time.
template <class T, class A>
cudaError_t rms_norm_backward(const RmsNormParams<T, A>& p, const T* dy, T* dx, A* partial, cudaStream_t stream);

}  // namespace fox::cuda
