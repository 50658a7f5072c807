#pragma once

#include "ops/recurrence.h"

namespace fox::ops {

/// The selective scan of Mamba (arXiv 2312.00752), a decay for every channel and state:
///     h_t = exp(dt_t a) * h_{t-1} + dt_t x_t b_tᵀ,   y_t = h_t c_t + d * x_t.
/// x, dt >= 0 (B, T, I); a <= 0 (I, N); b, c (B, T, N); d (I,); state (B, I, N). dt and a in float32 (float64 for
/// float64 x). float32, float64; bfloat16 and float16 x, b, c are computed in float32. Any strides and device;
/// differentiable (once).
///
/// No state is kept but the one before each chunk: the backward pass computes a chunk again, so that memory grows with
/// T I + T I N / chunk_size.
RecurrenceResult mamba(const at::Tensor& x_BTI, const at::Tensor& dt_BTI, const at::Tensor& a_IN,
                       const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_I,
                       const RecurrenceOptions& options = {});
/// Token by token, as the equation says.
RecurrenceResult mamba_reference(const at::Tensor& x_BTI, const at::Tensor& dt_BTI, const at::Tensor& a_IN,
                                 const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_I,
                                 const RecurrenceOptions& options = {});

}  // namespace fox::ops
