#include "mixers/initial_values.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

namespace fox::mixers {

void init_xavier(nn::Linear& linear) {
  const auto fan = static_cast<double>(linear.weight.size(0) + linear.weight.size(1));
  linear.init_uniform(std::pow(2.0, -2.5) * std::sqrt(6 / fan));
}

void init_time_steps(at::Tensor& bias, const ModelConfig& config) {
  at::NoGradGuard no_grad;
  const double low = std::log(config.time_step_min), high = std::log(config.time_step_max);
  const auto dt = (at::rand(bias.sizes(), at::kDouble) * (high - low) + low).exp().clamp_min(config.time_step_floor);
  bias.copy_(dt + (-(-dt).expm1()).log());  // the inverse of softplus
}

}  // namespace fox::mixers
