#include "mixers/decay_bias.h"

#include <ATen/Functions.h>

#include <cmath>

namespace fox::mixers {

at::Tensor decay_bias(int64_t num_heads, double t_min, double t_max) {
  const auto memory_H = at::linspace(std::log(t_min), std::log(t_max), num_heads, at::kDouble).exp();
  return memory_H.reciprocal().expm1().log().neg().to(at::kFloat);
}

}  // namespace fox::mixers
