#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fox::ops {

/// y_t = silu(b + Σ_s w_{K-1-s} x_{t-s}): a causal depthwise convolution of K taps over time, as Mamba, Mamba-2 and
/// DeltaNet have it, computed in float32 at least. x_{-1}, x_{-2}, … are the last ones of `before`, or 0; nothing
/// comes from another document.
/// x_BTC (B, T, C) with any strides; weight_KC (K, C), the current token's tap last; bias_C (C,); before_BSC
/// (B, K - 1, C); cu_seqlens (N + 1,) int64 (B = 1, without before). Returns (B, T, C) in x's dtype. Differentiable
/// (once) in x, weight, bias and before. On a GPU more than four taps are a composition of ATen's operators.
at::Tensor short_conv(const at::Tensor& x_BTC, const at::Tensor& weight_KC,
                      const std::optional<at::Tensor>& bias_C = {}, const std::optional<at::Tensor>& before_BSC = {},
                      const std::optional<at::Tensor>& cu_seqlens = {});
at::Tensor short_conv_reference(const at::Tensor& x_BTC, const at::Tensor& weight_KC,
                                const std::optional<at::Tensor>& bias_C = {},
                                const std::optional<at::Tensor>& before_BSC = {},
                                const std::optional<at::Tensor>& cu_seqlens = {});

}  // namespace fox::ops
