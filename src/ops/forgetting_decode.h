#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "ops/forgetting_attn.h"

namespace fox::ops {

/// The running sums of the gates beside a cache of keys and values, which decoding reads instead of the gates:
/// c_j log2(e) = block[j / 64] + r[j], r starting anew every 64 keys and block split into hi + lo floats, so that
/// differences keep their digits at any length.
struct GatePrefixes {
  at::Tensor r_BHT;       ///< (B, H, 64 N) float32
  at::Tensor block_BHN2;  ///< (B, H, N, 2) float32
};

/// Prefixes with room for `max_keys` keys a sequence; nothing is in them yet.
GatePrefixes make_gate_prefixes(int64_t batch, int64_t heads, int64_t max_keys, at::Device device);

/// Appends the gates log_f_BTH (B, T, H) float32 <= 0 of T new keys to each sequence. key_len_B (B,) int32 counts its
/// keys with the new ones. Throws fox::Error on shapes or dtypes outside this; a gate above 0 or NaN gives NaN from
/// there on.
void append_gate_prefixes(const GatePrefixes& prefixes, const at::Tensor& log_f_BTH, const at::Tensor& key_len_B);

/// What decoding can be told besides its tensors; as in ForgettingAttnOptions.
struct ForgettingDecodeOptions {
  std::optional<double> scale = {};
  std::optional<int64_t> window = {};
  std::optional<double> log_pruning_tolerance = {};  ///< needs logit_bound
  std::optional<at::Tensor> logit_bound = {};        ///< (H,) float32
  /// (B, Hk, pages) int32: where the 64 keys 64 n .. 64 n + 63 of a sequence's head lie in pools k, v (pages, 64, D).
  /// Entries of blocks that are pruned or behind the window are not read, so their pages may have been given back.
  std::optional<at::Tensor> block_table = {};
};

/// Forgetting attention of the last 1 to 8 queries of each sequence against a long cache: what forgetting_attn computes
/// row by row for sequences of different length.
///
/// q_BTHD (B, Tq, H, D), the queries of the last Tq keys; k, v (B, T, Hk, D) or, with a block table, (pages, 64, D);
/// bfloat16 or float16 on CUDA, any floating dtype on the CPU. key_len_B (B,) int32: keys of each sequence, at most
/// max_key_len; 0: its rows give 0. Not differentiable.
/// Throws fox::Error on shapes, dtypes or devices outside this, and on Tq H / Hk above 128.
ForgettingAttnResult forgetting_decode(const at::Tensor& q_BTHD, const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& key_len_B, int64_t max_key_len,
                                       const std::optional<GatePrefixes>& prefixes,
                                       const ForgettingDecodeOptions& options = {});

}  // namespace fox::ops
