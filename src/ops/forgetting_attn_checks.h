#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/forgetting_attn.h"

namespace fox::ops {

struct ForgettingAttnInputs {
  at::Tensor q, k, v;
  std::optional<at::Tensor> log_f;
};

/// Throws fox::Error unless shapes, dtypes, devices and options are what forgetting_attn supports on every device.
/// Values of gates are the backend's to check.
void check_forgetting_attn(const ForgettingAttnInputs& in, const ForgettingAttnOptions& options);

/// Throws fox::Error if the operator has no kernel for the tensor's device.
void check_forgetting_attn_device(const at::Tensor& q);

}  // namespace fox::ops
