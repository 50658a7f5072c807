#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fox::ops {

/// What forgetting attention can be told besides its tensors. Everything left out means plain dense causal attention.
struct ForgettingAttnOptions {
  std::optional<double> scale = {};           ///< logits are q·k * scale; default head_dim^-0.5
  std::optional<int64_t> window = {};         ///< keys i - window < j <= i; default all j <= i
  std::optional<at::Tensor> seq_start = {};   ///< (B,) int64: number of left-padding keys of each row
  std::optional<at::Tensor> cu_seqlens = {};  ///< (N + 1,) int64, B = 1: boundaries of packed documents, from 0 to T
  /// ln ε of adaptive pruning: blocks whose attention weights sum to at most ε over a row are skipped, so that
  /// |O - O_dense| <= 2ε max|V|. Default: dense.
  std::optional<double> log_pruning_tolerance = {};
  /// Upper bound of |q·k * scale| per head, (H,) float, e.g. from QK-norm scales; default: measured from the norms.
  std::optional<at::Tensor> logit_bound = {};
  bool deterministic = false;  ///< backward adds up in a fixed order (always so on the CPU)
};

struct ForgettingAttnResult {
  at::Tensor o_BTHD;   ///< dtype of q; a row that sees no key is 0
  at::Tensor lse_BHT;  ///< float32 (float64 for float64 inputs): natural log-sum-exp of each row; not differentiable
};

/// Forgetting attention (arXiv 2503.02130, eq. 3 to 5): o_i = Σ_j softmax_j(q_i·k_j * scale + D_ij) v_j,
/// D_ij = Σ_{l=j+1..i} log_f_l, causal; query i of Tq stands at position i + Tk - Tq.
///
/// q_BTHD (B, Tq, H, D); k_BTHD, v_BTHD (B, Tk, Hk, D), H a multiple of Hk; log_f_BTH (B, Tk, H), float32 (float64 for
/// float64 inputs), <= 0, one gate per *query* head, or nothing for plain attention. float32, float64; bfloat16 and
/// float16 inputs are computed in float32. On CUDA bfloat16 and float16 by tensor cores (compute capability 9.0: the
/// fast kernels, 8.0 and later: their plain ones) and float32, slowly; not float64. Any strides. Differentiable in q,
/// k, v and log_f (once). log_f = -inf is a hard reset and passes back 0. Throws fox::Error on shapes, dtypes or
/// devices outside this, and on log_f above 0 or NaN. On CUDA, where nobody waits for the kernels, such a gate makes
/// its head's rows NaN from there on and the *next* call throws, naming the gate's place; with FOX_SYNCHRONOUS=1 in the
/// environment the call itself does.
ForgettingAttnResult forgetting_attn(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD, const at::Tensor& v_BTHD,
                                     const std::optional<at::Tensor>& log_f_BTH,
                                     const ForgettingAttnOptions& options = {});

/// The same in ten readable lines of ATen, quadratic in memory and always dense; any floating dtype and device,
/// differentiable through autograd. Tests compare the fast path with it.
ForgettingAttnResult forgetting_attn_reference(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD,
                                               const at::Tensor& v_BTHD, const std::optional<at::Tensor>& log_f_BTH,
                                               const ForgettingAttnOptions& options = {});

/// For each head the share of causal 64×64 blocks that pruning with `options` keeps, (B, H) float64.
at::Tensor forgetting_attn_kept_share(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD, const at::Tensor& log_f_BTH,
                                      const ForgettingAttnOptions& options);

}  // namespace fox::ops
