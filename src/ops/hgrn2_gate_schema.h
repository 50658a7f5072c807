#pragma once

#include <tuple>

#include "ops/common.h"

/// The types of fox::hgrn2_gate and fox::hgrn2_gate_backward, for the CPU and CUDA sides.
namespace fox::ops {

/// log_g, k of logits, lower.
using Hgrn2GateResults = std::tuple<at::Tensor, at::Tensor>;
using Hgrn2GateForward = Hgrn2GateResults(const at::Tensor&, const OptionalTensor&);
/// dlogits, dlower (undefined where there is none) of dlog_g, dk, then as Forward.
using Hgrn2GateGradients = std::tuple<at::Tensor, at::Tensor>;
using Hgrn2GateBackward = Hgrn2GateGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                             const OptionalTensor&);

}  // namespace fox::ops
