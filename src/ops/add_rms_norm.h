#pragma once

#include <ATen/core/Tensor.h>

namespace fox::ops {

struct AddRmsNormResult {
  at::Tensor sum;     ///< x + branch, in x's dtype
  at::Tensor normed;  ///< RMSNorm of the sum, in the branch's dtype
};

/// The residual stream takes in a branch and is normalised for the next one: sum = x + branch,
/// normed = sum / sqrt(mean(sum²) + eps) * weight. x (..., C), branch (..., C), weight (C,); a bfloat16 branch beside a
/// float32 stream is what mixed precision has. Statistics in float32 at least, of the sum as it is rounded to x's
/// dtype. Differentiable (once) in x, branch and weight.
AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight, double eps);
AddRmsNormResult add_rms_norm_reference(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                        double eps);

}  // namespace fox::ops
