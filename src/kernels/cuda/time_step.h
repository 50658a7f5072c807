#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// Time steps softplus(logits + bias) of Mamba and Mamba-2 (ops/time_step.h). T: __nv_bfloat16, __half, float, double;
/// A: what T is computed in.
template <class T, class A>
struct TimeStepParams {
  const T* logits;  ///< rows × channels, rows `stride` elements apart
  int64_t stride;
  const A* bias;  ///< channels, contiguous from a 16-byte boundary on
  int64_t rows, channels;
};

/// dt (rows × channels, contiguous).
template <class T, class A>
cudaError_t time_step(const TimeStepParams<T, A>& p, A* dt, cudaStream_t stream);

/// Rows of `channels` that time_step_backward leaves partial sums in.
int64_t time_step_partials(int64_t rows);

/// From ddt: dlogits, both contiguous; and of each row of `partials` a part of the bias' gradient: sum_rows makes it of
/// them.
template <class T, class A>
cudaError_t time_step_backward(const TimeStepParams<T, A>& p, const A* ddt, T* dlogits, A* partials,
                               cudaStream_t stream);

}  // namespace fox::cuda
