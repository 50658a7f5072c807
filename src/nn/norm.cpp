#include "nn/norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "ops/rms_norm.h"

namespace fox::nn {

RmsNorm::RmsNorm(int64_t width, double eps, int64_t num_groups, bool shared)
    : weight(at::ones({shared ? width / num_groups : width}, at::kFloat)), eps(eps), num_groups(num_groups) {}

at::Tensor RmsNorm::forward(const at::Tensor& x) const { return ops::rms_norm(x, weight, eps, num_groups); }

void RmsNorm::init() {
  at::NoGradGuard no_grad;
  weight.fill_(1);
}

void RmsNorm::collect(const std::string& prefix, Parameters& out) const {
  out.push_back({prefix + "weight", weight, false});
}

}  // namespace fox::nn
