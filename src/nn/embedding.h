#pragma once

#include <string>

#include "nn/sequence.h"

namespace fox::nn {

/// A table of token vectors.
struct Embedding {
  at::Tensor weight;  ///< (V, C)

  /// float32 on the CPU, values undefined.
  Embedding(int64_t vocab_size, int64_t width);

  /// ids (...) int64 → (..., C) in the weight's dtype. Throws fox::Error on an id outside [0, V) (CPU).
  at::Tensor forward(const at::Tensor& ids) const;
  /// N(0, std).
  void init(double std);
  /// Appends `prefix` + "weight" (decays).
  void collect(const std::string& prefix, Parameters& out) const;
};

}  // namespace fox::nn
