#pragma once

#include <ATen/core/Tensor.h>

namespace fox::ops {

/// Output norm and output gate of a mixer: rms_norm(x, weight, eps, num_groups) * activation(gate), the activation
/// σ(z), or z σ(z) when `silu`. x, gate (..., C) with any strides and one dtype; weight (C,), or (C / num_groups,)
/// shared by the groups. Differentiable (once) in x, gate and weight.
at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                          int64_t num_groups, bool silu);
at::Tensor gated_rms_norm_reference(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                                    int64_t num_groups, bool silu);

}  // namespace fox::ops
