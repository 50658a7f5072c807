#pragma once

#include <ATen/core/Tensor.h>

#include "config/model_config.h"
#include "nn/linear.h"

namespace fox::mixers {

/// Xavier-uniform with gain 2^-2.5, as the mixers of HGRN2 and DeltaNet start.
void init_xavier(nn::Linear& linear);

/// Biases b whose time steps softplus(b) are log-uniform in [time_step_min, time_step_max], at least time_step_floor,
/// as Mamba and Mamba-2 start.
void init_time_steps(at::Tensor& bias, const ModelConfig& config);

}  // namespace fox::mixers
