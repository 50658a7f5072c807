#include "nn/residual_stream.h"

#include <ATen/core/TensorBody.h>

#include "ops/add_rms_norm.h"

namespace fox::nn {

at::Tensor ResidualStream::normed(const RmsNorm& norm, at::ScalarType compute) {
  if (!branch_BTC.defined()) return norm.forward(sum_BTC).to(compute);
  auto [sum, normed] = ops::add_rms_norm(sum_BTC, branch_BTC, norm.weight, norm.eps);
  sum_BTC = sum;
  branch_BTC.reset();
  return normed.to(compute);
}

}  // namespace fox::nn
