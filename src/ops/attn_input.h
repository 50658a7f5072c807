#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace fox::ops {

/// Which steps attn_input takes, in this order.
struct AttnInputOptions {
  /// Token shift (ops/token_shift.h) with α = σ(shift_logits); (B, T, H).
  std::optional<at::Tensor> shift_logits_BTH = {};
  std::optional<at::Tensor> prev_BHD = {};    ///< of the token shift: what stands before t = 0, or nothing for 0
  std::optional<at::Tensor> cu_seqlens = {};  ///< of the token shift: packed documents
  std::optional<at::Tensor> seq_start = {};   ///< of the token shift: first tokens
  /// RMSNorm of each head (ops/rms_norm.h): (H · D,), or (D,) shared by the heads.
  std::optional<at::Tensor> norm_weight = {};
  double norm_eps = 0;
  /// Rotary embedding (ops/rotary.h).
  std::optional<double> rotary_base = {};
  int64_t rotary_offset = 0;
};

/// What becomes of queries, keys or values between their projection and attention, in one pass over x_BTHD (B, T, H,
/// D), any strides with D contiguous without a copy (a slice of a packed projection): token shift, norm of each head,
/// rotation, each if it is asked for. Intermediate values are float32 at least. With nothing asked for it is x_BTHD.
/// Differentiable (once) in x, shift_logits, prev and norm_weight.
at::Tensor attn_input(const at::Tensor& x_BTHD, const AttnInputOptions& options);
at::Tensor attn_input_reference(const at::Tensor& x_BTHD, const AttnInputOptions& options);

}  // namespace fox::ops
