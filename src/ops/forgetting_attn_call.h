#pragma once

#include "ops/forgetting_attn_checks.h"
#include "ops/forgetting_attn_schema.h"

/// What functions of autograd around the dispatcher's operators share; the operators' contract is in
/// forgetting_attn.cpp.
namespace fox::ops {

ForgettingAttnOutputs call_forgetting_attn(const ForgettingAttnInputs& in, const ForgettingAttnOptions& options);
ForgettingAttnGradients call_forgetting_attn_backward(const at::Tensor& grad_o, const ForgettingAttnInputs& in,
                                                      const at::Tensor& o, const at::Tensor& lse,
                                                      const ForgettingAttnOptions& options);

/// The options that are no tensors, from the forward to the backward pass.
void keep_numbers(torch::autograd::AutogradContext* ctx, const ForgettingAttnOptions& options);
ForgettingAttnOptions kept_numbers(torch::autograd::AutogradContext* ctx);

}  // namespace fox::ops
