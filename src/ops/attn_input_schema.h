#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

/// The types of fox::attn_input and fox::attn_input_backward, for the CPU and CUDA sides.
namespace fox::ops::attn_input_schema {

using OptionalTensor = std::optional<at::Tensor>;
/// x, shift_logits, prev, cu_seqlens, seq_start, norm_weight, norm_eps, rotary_base, rotary_offset.
using Forward = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, double, std::optional<double>, int64_t);
/// dx, dshift_logits, dprev, dnorm_weight; undefined where the argument is missing.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
/// dy, then as Forward.
using Backward = Gradients(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, double,
                           std::optional<double>, int64_t);

}  // namespace fox::ops::attn_input_schema
