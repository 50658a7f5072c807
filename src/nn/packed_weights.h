#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fox::nn {

/// Tells those who ask by a weight's version whether it has changed that it has: for whoever writes to one in a way
/// that autograd does not see, as fused kernels, collectives and replayed graphs do.
void mark_changed(const at::Tensor& weight);

/// Weights (out_i, in) below one another in the dtype of the activations: made when one of them has changed and not on
/// each use, so once a step in training (however many forward passes that is) and once for a model that is only read.
/// A copy of this object shares what is made. Safe to use from several threads as long as nobody changes the weights.
class PackedWeights {
 public:
  PackedWeights();
  /// (Σ out_i, in) in `dtype`, no gradient; rows of zeros make their number a multiple of `row_multiple`. A single
  /// weight that is so already is handed back itself.
  at::Tensor get(const std::vector<at::Tensor>& weights, at::ScalarType dtype, int64_t row_multiple = 1) const;

 private:
  struct Memory;
  std::shared_ptr<Memory> memory_;
};

}  // namespace fox::nn
