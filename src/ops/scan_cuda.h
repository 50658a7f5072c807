#pragma once

#include "kernels/cuda/head_tensor.h"
#include "ops/cuda_common.h"
#include "ops/scan_op.h"

/// What the CUDA sides of the recurrences share.
namespace fox::ops {

/// The tensor, or a copy where it is not contiguous from a 16-byte boundary on.
inline at::Tensor dense(const at::Tensor& t) {
  const auto contiguous = t.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

/// x (..., D) as the kernels read it, start, strides and last dimension fit for 16-byte copies: itself, or a copy.
inline at::Tensor aligned_rows(const at::Tensor& x) {
  const auto item = x.element_size();
  bool fits = x.stride(-1) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) fits = fits && (x.size(i) == 1 || x.stride(i) * item % 16 == 0);
  return fits ? x : dense(x);
}

/// x (B, T, H, D).
template <class T>
cuda::HeadTensor<T> head_tensor(const at::Tensor& x) {
  return {.data = data<T>(x), .batch = x.stride(0), .time = x.stride(1), .head = x.stride(2)};
}

inline at::Tensor empty_like_packed(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }
inline at::Tensor workspace_of(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

/// Batch and heads are a dimension of the kernels' grids.
inline bool fits_grid(const at::Tensor& x_BTH) { return x_BTH.size(0) * x_BTH.size(2) < 65536; }

}  // namespace fox::ops
