#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fox::ops {

/// Data-dependent token shift (arXiv 2503.02130, section 3.4): y_t = α_t x_{t-1} + (1 - α_t) x_t per head, with
/// x_{-1} = prev, or 0. A document that begins at a later t > 0 has 0 before it.
/// x_BTHD (B, T, H, D) with any strides; alpha_BTH (B, T, H); prev_BHD (B, H, D) or nothing for 0;
/// cu_seqlens (N + 1,) int64 (B = 1) and seq_start (B,) int64 mark first tokens. Differentiable (once) in x, alpha,
/// prev.
at::Tensor token_shift(const at::Tensor& x_BTHD, const at::Tensor& alpha_BTH,
                       const std::optional<at::Tensor>& prev_BHD = {}, const std::optional<at::Tensor>& cu_seqlens = {},
                       const std::optional<at::Tensor>& seq_start = {});
at::Tensor token_shift_reference(const at::Tensor& x_BTHD, const at::Tensor& alpha_BTH,
                                 const std::optional<at::Tensor>& prev_BHD = {},
                                 const std::optional<at::Tensor>& cu_seqlens = {},
                                 const std::optional<at::Tensor>& seq_start = {});

}  // namespace fox::ops
