#pragma once

#include <tuple>

#include "ops/common.h"

/// The types of fox::time_step and fox::time_step_backward, for the CPU and CUDA sides.
namespace fox::ops {

/// logits, bias.
using TimeStepForward = at::Tensor(const at::Tensor&, const at::Tensor&);
/// dlogits, dbias of ddt, then as Forward.
using TimeStepGradients = std::tuple<at::Tensor, at::Tensor>;
using TimeStepBackward = TimeStepGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&);

}  // namespace fox::ops
