#pragma once

#include "ops/recurrence.h"

namespace fox::ops {

/// The recurrence of HGRN2 (arXiv 2404.07904), gated linear attention with a forget gate for every key channel:
///     S_t = g_t * S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t / √K.
/// q, k, log_g = ln g <= 0 (B, T, H, K); v (B, T, H, V); state (B, H, K, V). HGRN2 has k = 1 - g, which whoever knows
/// the gate's logit computes better than 1 - exp(log_g). log_g = -inf forgets everything.
/// float32, float64; bfloat16 and float16 are computed in float32. Any strides and device; differentiable.
///
/// Every decay between two tokens is made of the gates between them alone, a sum of their logs or a product, never a
/// difference or a quotient: nothing overflows, and strong gates do not cost the digits of weak ones.
RecurrenceResult hgrn2(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                       const at::Tensor& log_g_BTHK, const RecurrenceOptions& options = {});
/// Token by token, as the equation says.
RecurrenceResult hgrn2_reference(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                                 const at::Tensor& log_g_BTHK, const RecurrenceOptions& options = {});

}  // namespace fox::ops
