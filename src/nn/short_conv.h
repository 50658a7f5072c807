#pragma once

#include <string>

#include "nn/sequence.h"

namespace fox::nn {

/// The last K - 1 inputs of a convolution, (B, K - 1, C); undefined before the first token.
struct ShortConvTail {
  at::Tensor inputs;
};

/// A short causal depthwise convolution over time with SiLU (ops/short_conv.h), with x = 0 before a document's first
/// token and in left padding.
struct ShortConv {
  at::Tensor weight;  ///< (C, 1, K), the current token's tap last
  at::Tensor bias;    ///< (C,) or undefined

  /// float32 on the CPU, values undefined.
  ShortConv(int64_t channels, int64_t taps, bool with_bias);

  /// x (B, T, C) → (B, T, C) in x's dtype. With a tail, continues from it and replaces it.
  at::Tensor forward(const at::Tensor& x_BTC, const Sequence& sequence, ShortConvTail* tail) const;
  /// U(-1/√K, 1/√K) for both, PyTorch's default.
  void init();
  /// Appends `prefix` + "weight" (decays) and `prefix` + "bias" (does not).
  void collect(const std::string& prefix, Parameters& out) const;
};

}  // namespace fox::nn
