#include "nn/linear_together.h"

#include <ATen/Functions.h>

namespace fox::nn {
namespace {

// Concatenating reads and writes every weight once. From about this many rows on that is lost beside the product; a
// decoding step, which only reads the weights, would take three times as long.
constexpr int64_t kRowsWorthConcatenating = 64;

}  // namespace

std::vector<at::Tensor> linear_together(const at::Tensor& x, const std::vector<at::Tensor>& weights) {
  std::vector<at::Tensor> results;
  if (weights.size() == 1 || x.numel() / x.size(-1) < kRowsWorthConcatenating) {
    for (const auto& weight : weights) results.push_back(at::linear(x, weight.to(x.scalar_type())));
    return results;
  }
  std::vector<int64_t> widths;
  for (const auto& weight : weights) widths.push_back(weight.size(0));
  return at::linear(x, at::cat(weights).to(x.scalar_type())).split_with_sizes(widths, -1);
}

}  // namespace fox::nn
