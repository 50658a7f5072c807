#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <random>
#include <vector>

namespace fox::infer {

/// How the next token is drawn. The filters apply in this order: temperature, top_k, top_p.
struct SamplingOptions {
  double temperature = 1;  ///< logits are divided by it; 0 is greedy: the largest logit, the lowest id of equals
  int64_t top_k = 0;       ///< only the k most likely tokens; 0: all
  double top_p = 1;        ///< only the fewest tokens whose probabilities reach top_p; 1: all
  uint64_t seed = 0;

  /// Throws fox::Error naming the field that is out of range.
  void validate() const;
};

/// Probability of each of the V tokens under `options`; they sum to 1. logits_V (V,) of any floating dtype.
/// Throws fox::Error when a logit is NaN or none is finite.
std::vector<double> sampling_probabilities(const at::Tensor& logits_V, const SamplingOptions& options);

/// Draws tokens; the same seed and logits give the same tokens on every machine.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);
  int32_t draw(const at::Tensor& logits_V);

 private:
  SamplingOptions options_;
  std::mt19937_64 random_;
};

}  // namespace fox::infer
