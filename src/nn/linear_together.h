#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "nn/packed_weights.h"

namespace fox::nn {

/// x (..., in) times several weights (out_i, in) as one matrix product → (..., Σ out_i): small projections (a gate a
/// head) cost almost nothing then. The weights may have another dtype than x: `packed`, which belongs to them, keeps
/// them in x's, and their gradients come in their own, from sums that were never rounded to x's (CUDA).
at::Tensor linear_packed(const at::Tensor& x, const std::vector<at::Tensor>& weights, const PackedWeights& packed);

/// The same cut apart: one view (..., out_i) a weight (last stride 1).
std::vector<at::Tensor> linear_together(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                        const PackedWeights& packed);

}  // namespace fox::nn
