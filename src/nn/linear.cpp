#include "nn/linear.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "nn/linear_together.h"

namespace fox::nn {

Linear::Linear(int64_t in_features, int64_t out_features, bool with_bias)
    : weight(at::empty({out_features, in_features}, at::kFloat)) {
  if (with_bias) bias = at::empty({out_features}, at::kFloat);
}

at::Tensor Linear::forward(const at::Tensor& x) const {
  if (!bias.defined()) return linear_packed(x, {weight}, packed);
  return at::linear(x, weight.to(x.scalar_type()), bias.to(x.scalar_type()));
}

void Linear::init(double std) {
  at::NoGradGuard no_grad;
  weight.normal_(0, std);
  if (bias.defined()) bias.zero_();
}

void Linear::init_uniform(double bound) {
  at::NoGradGuard no_grad;
  weight.uniform_(-bound, bound);
  if (bias.defined()) bias.zero_();
}

void Linear::init_default(double factor) { init_uniform(factor / std::sqrt(static_cast<double>(weight.size(1)))); }

void Linear::collect(const std::string& prefix, Parameters& out) const {
  out.push_back({prefix + "weight", weight, true});
  if (bias.defined()) out.push_back({prefix + "bias", bias, false});
}

}  // namespace fox::nn
