#pragma once

#include "kernels/cpu/chunks.h"
#include "ops/scan_op.h"

/// What the CPU sides of the recurrences share.
namespace fox::ops {

/// x (B, T, H, D) as the kernels read it, in `type` and D contiguous: itself, or a copy.
inline at::Tensor packed_rows(const at::Tensor& x, at::ScalarType type) {
  const auto y = cast(x, type);
  return y.stride(-1) == 1 || y.size(-1) == 1 ? y : y.contiguous();
}

template <class T>
kernels::HeadRows<const T> head_rows(const at::Tensor& x) {
  return {.data = x.const_data_ptr<T>(), .batch = x.stride(0), .time = x.stride(1), .head = x.stride(2)};
}
template <class T>
kernels::HeadRows<T> mutable_head_rows(const at::Tensor& x) {
  return {.data = x.mutable_data_ptr<T>(), .batch = x.stride(0), .time = x.stride(1), .head = x.stride(2)};
}

/// Room for the gradient of x, contiguous; for `count` states like `first`.
inline at::Tensor room_for_gradient(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }
inline at::Tensor room_for_states(int64_t count, const at::Tensor& first) {
  auto shape = first.sizes().vec();
  shape.insert(shape.begin(), count);
  return at::empty(shape, first.options());
}

}  // namespace fox::ops
