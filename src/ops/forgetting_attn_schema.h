#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

/// The C++ types of fox::forgetting_attn and fox::forgetting_attn_backward, for those who look the operators up or
/// implement them: a handle of another type than the schema's is an error only when it is called. The contract is in
/// forgetting_attn.cpp.
namespace fox::ops::forgetting_attn_schema {

using OptionalTensor = std::optional<at::Tensor>;
using Result = std::tuple<at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Forward = Result(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                       std::optional<double>, std::optional<int64_t>, const OptionalTensor&, const OptionalTensor&,
                       std::optional<double>, const OptionalTensor&, bool);
using Backward = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const OptionalTensor&, const at::Tensor&, const at::Tensor&, std::optional<double>,
                           std::optional<int64_t>, const OptionalTensor&, const OptionalTensor&, std::optional<double>,
                           const OptionalTensor&, bool);

}  // namespace fox::ops::forgetting_attn_schema
