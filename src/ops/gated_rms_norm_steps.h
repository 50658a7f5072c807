#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace fox::ops {

/// dx, dgate, dweight.
using GatedRmsNormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// fox::gated_rms_norm and its backward as a sequence of other operators, for shapes that the CUDA kernel does not
/// take.
at::Tensor gated_rms_norm_steps(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                                int64_t num_groups, bool silu);
GatedRmsNormGradients gated_rms_norm_backward_steps(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate,
                                                    const at::Tensor& weight, double eps, int64_t num_groups,
                                                    bool silu);

}  // namespace fox::ops
