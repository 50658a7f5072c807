#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fox::nn {

/// x (..., in) times several weights (out_i, in) → one (..., out_i) each, as one matrix product where that pays: small
/// projections (a gate a head) cost almost nothing then. The results may be views of one tensor (last stride 1).
/// Weights are cast to x's dtype on use.
std::vector<at::Tensor> linear_together(const at::Tensor& x, const std::vector<at::Tensor>& weights);

}  // namespace fox::nn
