#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fox::ops {

/// RMSNorm over each of `num_groups` equal slices of the last dimension: y = x / sqrt(mean(x²) + eps) * weight.
/// x (..., C) with any strides; weight (C,) or (C / num_groups,), the latter shared by the groups (QK-norm with
/// parameters shared across heads), or nothing for 1. Statistics in float32 at least; the result has x's dtype.
/// Differentiable (once) in x and weight.
at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps, int64_t num_groups = 1);
at::Tensor rms_norm_reference(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                              int64_t num_groups = 1);

}  // namespace fox::ops
