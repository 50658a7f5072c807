#pragma once

#include <string>

#include "nn/linear.h"

namespace fox::nn {

/// The SwiGLU feed-forward layer: down(silu(g) * y) with (g, y) = the two halves of gate_proj's output.
struct SwigluMlp {
  Linear gate_proj;  ///< (2I, C): gate and value in one product
  Linear down_proj;  ///< (C, I)

  SwigluMlp(int64_t width, int64_t intermediate);

  /// x (..., C) → (..., C).
  at::Tensor forward(const at::Tensor& x) const;
  /// N(0, std).
  void init(double std);
  /// Appends `prefix` + "gate_proj.weight" and `prefix` + "down_proj.weight".
  void collect(const std::string& prefix, Parameters& out) const;
};

}  // namespace fox::nn
