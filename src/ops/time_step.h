#pragma once

#include <ATen/core/Tensor.h>

namespace fox::ops {

/// Time steps of Mamba and Mamba-2, softplus(logits + bias) = ln(1 + e^(z + b)): logits (..., C) with any strides, bias
/// (C,) → (..., C) in float32 at least. Differentiable (once).
at::Tensor time_step(const at::Tensor& logits, const at::Tensor& bias_C);
at::Tensor time_step_reference(const at::Tensor& logits, const at::Tensor& bias_C);

}  // namespace fox::ops
