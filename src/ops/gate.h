#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fox::ops {

/// log f = log σ(logits + bias): the forget gate of arXiv 2503.02130, eq. 2. logits (..., H) of any floating dtype,
/// bias (H,) or nothing; the result is float32 (float64 for float64 logits) whatever the dtype of the logits, because
/// its prefix sums are exponents. Differentiable (once) in logits and bias.
at::Tensor log_sigmoid_gate(const at::Tensor& logits, const std::optional<at::Tensor>& bias);
at::Tensor log_sigmoid_gate_reference(const at::Tensor& logits, const std::optional<at::Tensor>& bias);

}  // namespace fox::ops
