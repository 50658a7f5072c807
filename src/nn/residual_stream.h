#pragma once

#include <ATen/core/Tensor.h>

#include "nn/norm.h"

namespace fox::nn {

/// What runs through the layers of a model: the sum of the embedding and the layers' branches, and the newest branch,
/// which is not in it yet: the norm that comes next adds it in the same pass over memory (ops/add_rms_norm.h).
struct ResidualStream {
  at::Tensor sum_BTC;     ///< in its own dtype, float32 in training
  at::Tensor branch_BTC;  ///< in the dtype of the activations; undefined before the first layer

  /// Adds the branch and returns the norm of the sum in `compute`. The stream is left without a branch.
  at::Tensor normed(const RmsNorm& norm, at::ScalarType compute);
};

}  // namespace fox::nn
