#pragma once

#include <string>

#include "nn/sequence.h"

namespace fox::nn {

/// RMSNorm over each of `num_groups` equal slices of the last dimension (ops/rms_norm.h). The weight stays in its own
/// dtype: statistics and product are float32 at least.
struct RmsNorm {
  at::Tensor weight;  ///< (width,), or (width / num_groups,) when the groups share it
  double eps;
  int64_t num_groups;

  /// float32 on the CPU, weight 1.
  RmsNorm(int64_t width, double eps, int64_t num_groups = 1, bool shared = false);

  /// x (..., width) with any strides → the same shape, x's dtype.
  at::Tensor forward(const at::Tensor& x) const;
  void init();
  /// Appends `prefix` + "weight"; norms do not decay.
  void collect(const std::string& prefix, Parameters& out) const;
};

}  // namespace fox::nn
