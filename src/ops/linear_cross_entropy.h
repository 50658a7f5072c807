#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fox::ops {

struct LinearCrossEntropyResult {
  at::Tensor total;   ///< scalar, float32 at least: Σ_n weight_n loss_n; differentiable (once) in x and w
  at::Tensor loss_N;  ///< (N,) float32 at least: nats of each token, 0 where the label is ignored; not differentiable
};

/// The LM head and its loss without the logits: loss_n = logsumexp_v(x_n·w_v) - x_n·w_{label_n}, in chunks of rows so
/// that at most a few MB of logits exist at once. x_NC (N, C); w_VC (V, C); labels_N (N,) int64, -100 = ignored;
/// token_weight_N (N,) or nothing for 1 / (number of labels that count). Where a gradient is wanted it is computed in
/// the forward pass, while the logits are there (three matrix products in all), and scaled in the backward pass.
LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& x_NC, const at::Tensor& w_VC,
                                              const at::Tensor& labels_N,
                                              const std::optional<at::Tensor>& token_weight_N = {});
LinearCrossEntropyResult linear_cross_entropy_reference(const at::Tensor& x_NC, const at::Tensor& w_VC,
                                                        const at::Tensor& labels_N,
                                                        const std::optional<at::Tensor>& token_weight_N = {});

}  // namespace fox::ops
