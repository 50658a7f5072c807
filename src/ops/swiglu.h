#pragma once

#include <ATen/core/Tensor.h>

namespace fox::ops {

/// SwiGLU: silu(gate) * value, of two tensors (..., C) with any strides and one dtype; computed in float32 at least.
/// Differentiable (once).
at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& value);
at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& value);

/// The same of the two halves of the last dimension of gate_up (..., 2I) → (..., I).
at::Tensor swiglu(const at::Tensor& gate_up);
at::Tensor swiglu_reference(const at::Tensor& gate_up);

}  // namespace fox::ops
