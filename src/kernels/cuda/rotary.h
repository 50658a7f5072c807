#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// y (B, T, H, D contiguous): pairs (x_i, x_{i + D/2}) turned by the table's angles, or back when `inverse`. x has a
/// contiguous last dimension and the given strides in elements; cos, sin (T, D/2) in float (double for double).
template <class T, class A>
struct RotaryParams {
  const T* x;
  int64_t x_batch, x_time, x_head;
  const A *cos, *sin;
  int64_t batch, time, heads, dim;
  bool inverse;
};

template <class T, class A>
cudaError_t rotary(const RotaryParams<T, A>& p, T* y, cudaStream_t stream);

}  // namespace fox::cuda
