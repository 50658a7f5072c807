#pragma once

#include "ops/recurrence.h"

namespace fox::ops {

/// The state space model of Mamba-2 (SSD, arXiv 2405.21060), one decay a head, b and c shared by the heads:
///     h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_tᵀ,   y_t = h_t c_t + d x_t.
/// x (B, T, H, P); dt >= 0 (B, T, H); a <= 0, d (H,); b, c (B, T, N); state (B, H, P, N). dt and a in float32 (float64
/// for float64 x). float32, float64; bfloat16 and float16 x, b, c are computed in float32. Any strides and device;
/// differentiable.
RecurrenceResult mamba2(const at::Tensor& x_BTHP, const at::Tensor& dt_BTH, const at::Tensor& a_H,
                        const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_H,
                        const RecurrenceOptions& options = {});
/// Token by token, as the equation says.
RecurrenceResult mamba2_reference(const at::Tensor& x_BTHP, const at::Tensor& dt_BTH, const at::Tensor& a_H,
                                  const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_H,
                                  const RecurrenceOptions& options = {});

}  // namespace fox::ops
