#pragma once

#include <ATen/core/Tensor.h>

namespace fox::ops {

/// SwiGLU: silu(g) * y with (g, y) the two halves of the last dimension of gate_up (..., 2I) → (..., I).
/// Differentiable (once).
at::Tensor swiglu(const at::Tensor& gate_up);
at::Tensor swiglu_reference(const at::Tensor& gate_up);

}  // namespace fox::ops
