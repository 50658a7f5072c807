#pragma once

#include <tuple>

#include "ops/common.h"

/// The types of fox::attn_input and fox::attn_input_backward, for the CPU and CUDA sides.
namespace fox::ops {

/// x, shift_logits, prev, cu_seqlens, seq_start, norm_weight, norm_eps, rotary_base, rotary_offset.
using AttnInputForward = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
                                    std::optional<double>, int64_t);
/// dx, dshift_logits, dprev, dnorm_weight; undefined where the argument is missing.
using AttnInputGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
/// dy, then as Forward.
using AttnInputBackward = AttnInputGradients(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                             const OptionalTensor&, double, std::optional<double>, int64_t);

}  // namespace fox::ops
