#pragma once

#include <string>

#include "nn/packed_weights.h"
#include "nn/sequence.h"

namespace fox::nn {

/// y = x Wᵀ + b. The weight serves in x's dtype, cast when it has changed, so float32 masters serve bfloat16
/// activations and receive float32 gradients.
struct Linear {
  at::Tensor weight;     ///< (out, in)
  at::Tensor bias;       ///< (out,) or undefined
  PackedWeights packed;  ///< the weight in the activations' dtype

  /// float32 on the CPU, values undefined.
  Linear(int64_t in_features, int64_t out_features, bool with_bias = false);

  /// x (..., in) → (..., out).
  at::Tensor forward(const at::Tensor& x) const;
  /// Weight N(0, std) from ATen's default generator, bias 0.
  void init(double std);
  /// Weight U(-bound, bound), bias 0.
  void init_uniform(double bound);
  /// PyTorch's default for weights, U(-1/√in, 1/√in), times `factor`; bias 0.
  void init_default(double factor = 1);
  /// Appends `prefix` + "weight" (decays) and `prefix` + "bias" (does not).
  void collect(const std::string& prefix, Parameters& out) const;
};

}  // namespace fox::nn
