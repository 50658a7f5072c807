#pragma once

#include <tuple>

#include "ops/common.h"

/// The C++ types of fox::forgetting_attn and fox::forgetting_attn_backward, for those who look the operators up or
/// implement them: a handle of another type than the schema's is an error only when it is called. The contract is in
/// forgetting_attn.cpp.
namespace fox::ops {

using ForgettingAttnOutputs = std::tuple<at::Tensor, at::Tensor>;
using ForgettingAttnGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using ForgettingAttnForward = ForgettingAttnOutputs(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                    const OptionalTensor&, std::optional<double>,
                                                    std::optional<int64_t>, const OptionalTensor&,
                                                    const OptionalTensor&, std::optional<double>, const OptionalTensor&,
                                                    bool);
using ForgettingAttnBackward = ForgettingAttnGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                       const at::Tensor&, const OptionalTensor&, const at::Tensor&,
                                                       const at::Tensor&, std::optional<double>, std::optional<int64_t>,
                                                       const OptionalTensor&, const OptionalTensor&,
                                                       std::optional<double>, const OptionalTensor&, bool);

}  // namespace fox::ops
