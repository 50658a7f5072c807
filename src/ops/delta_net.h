#pragma once

#include "ops/recurrence.h"

namespace fox::ops {

/// The delta rule (arXiv 2406.06484): the value that the state holds for k_t is moved towards v_t by the share beta_t,
///     S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ,   o_t = S_tᵀ q_t / √K.
/// q, k (B, T, H, K), keys of length 1 at most; v (B, T, H, V); beta in [0, 1] (B, T, H); state (B, H, K, V).
/// float32, float64; bfloat16 and float16 are computed in float32. Any strides and device; differentiable.
///
/// A chunk's C updates are one triangular system for what each token really writes (the WY representation of a product
/// of Householder-like matrices); the rest are matrix products.
RecurrenceResult delta_net(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                           const at::Tensor& beta_BTH, const RecurrenceOptions& options = {});
/// Token by token, as the equation says.
RecurrenceResult delta_net_reference(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                                     const at::Tensor& beta_BTH, const RecurrenceOptions& options = {});

}  // namespace fox::ops
