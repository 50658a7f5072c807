#pragma once

#include <ATen/core/Tensor.h>

namespace fox::mixers {

/// Gate biases (H,) whose heads remember T_h tokens, T_h log-spaced from t_min to t_max: σ(b_h) = exp(-1/T_h), that is
/// b_h = -ln(expm1(1/T_h)). float32.
at::Tensor decay_bias(int64_t num_heads, double t_min, double t_max);

}  // namespace fox::mixers
