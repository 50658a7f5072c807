#pragma once

#include <cstdint>

namespace fox::kernels {

template <class T>
struct RotaryParams {
  const T* x;                       ///< (B, T, H, D), D even and contiguous
  int64_t x_batch, x_time, x_head;  ///< its strides in elements
  const T* cos;                     ///< (T, D / 2), contiguous
  const T* sin;
  int64_t batch, time, heads, dim;
};

/// y (contiguous): the pairs (x_i, x_{i + D/2}) turned by the table's angles, or back by them when `inverse`.
template <class T>
void rotary(const RotaryParams<T>& p, bool inverse, T* y);

}  // namespace fox::kernels
