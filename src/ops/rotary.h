#pragma once

#include <ATen/core/Tensor.h>

namespace fox::ops {

/// Rotary position embedding (arXiv 2104.09864), half-split pairing: angle(t, i) = (offset + t) * base^(-2i/D).
/// x_BTHD (B, T, H, D), D even, any strides. Angles are computed in float64. Differentiable (once) in x.
at::Tensor rotary(const at::Tensor& x_BTHD, double base, int64_t offset = 0);
at::Tensor rotary_reference(const at::Tensor& x_BTHD, double base, int64_t offset = 0);

}  // namespace fox::ops
