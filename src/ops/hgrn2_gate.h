#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fox::ops {

struct Hgrn2Gate {
  at::Tensor log_g;  ///< ln g, in float32 at least
  at::Tensor k;      ///< 1 - g, in the logits' dtype
};

/// The forget gate of HGRN2 (arXiv 2404.07904) for every channel, g = l + (1 - l) σ(z) with l a lower bound or 0, and
/// the keys that go with it, k = 1 - g = (1 - l) σ(-z), which keep their digits where g is close to 1.
/// logits z (..., C) with any strides; lower_C (C,) in [0, 1). Computed in float32 at least. Differentiable (once) in
/// both.
Hgrn2Gate hgrn2_gate(const at::Tensor& logits, const std::optional<at::Tensor>& lower_C = {});
Hgrn2Gate hgrn2_gate_reference(const at::Tensor& logits, const std::optional<at::Tensor>& lower_C = {});

}  // namespace fox::ops
