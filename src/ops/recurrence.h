#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

/// What the linear recurrences (hgrn2, delta_net, mamba2, mamba) share: their options, and how time is cut into chunks.
namespace fox::ops {

struct RecurrenceOptions {
  std::optional<at::Tensor> cu_seqlens = {};     ///< (N + 1,) int64, B = 1: each document starts from a state of 0
  std::optional<at::Tensor> seq_start = {};      ///< (B,) int64: left-padding tokens of each row; they leave no trace
  std::optional<at::Tensor> initial_state = {};  ///< what the tokens before left behind; default 0; not with cu_seqlens
  int64_t chunk_size = 64;  ///< tokens computed together where no kernel decides that; changes the time, not the result
};

struct RecurrenceResult {
  at::Tensor o;      ///< shape and dtype of the values; rows of padding are 0 or of no meaning
  at::Tensor state;  ///< after the last token; float32 (float64 for float64 inputs)
};

/// Throws fox::Error on options that do not fit a batch of `batch` rows of `length` tokens and states of `state_shape`,
/// named by `layout`, e.g. "(B, H, K, V)".
void check_recurrence(const char* op, const RecurrenceOptions& options, int64_t batch, int64_t length,
                      at::IntArrayRef state_shape, const char* layout);

/// options.initial_state in `like`'s dtype, or 0.
at::Tensor initial_state(const RecurrenceOptions& options, at::IntArrayRef state_shape, const at::Tensor& like);

/// 1 / √K, what scores of queries q (..., K) are multiplied with.
double score_scale(const at::Tensor& q);

/// Number of the document that each of `length` positions belongs to, (T,) int64. Read on the device: no wait for it.
at::Tensor document_numbers(const at::Tensor& cu_seqlens, int64_t length);
/// How many tokens before each position are of its document, (T,) int64.
at::Tensor tokens_before(const at::Tensor& cu_seqlens, int64_t length);
/// Whether each position is the first of its document, (T,) bool.
at::Tensor document_starts(const at::Tensor& cu_seqlens, int64_t length);

/// x_BT... with 0 in the padding. Values there may be anything, NaN too.
at::Tensor without_padding(const at::Tensor& x_BT, const std::optional<at::Tensor>& seq_start);

/// Log decays (B, T, ...) of the state, 0 in padding (it changes nothing) and -inf where a document starts (nothing of
/// what came before is left).
at::Tensor with_resets(const at::Tensor& log_decay_BT, const RecurrenceOptions& options);

/// x (B, T, H, ...) → (B, H, n, C, ...), the last chunk filled up with 0.
at::Tensor to_chunks(const at::Tensor& x_BTH, int64_t chunk);
/// The inverse: (B, H, n, C, ...) → (B, T, H, ...).
at::Tensor from_chunks(const at::Tensor& x_BHnC, int64_t length);

/// States before each chunk and after the last: S_{c+1} = decay_c * S_c + added_c.
struct ChunkStates {
  at::Tensor before_BHnKV;
  at::Tensor last_BHKV;
};
/// decay broadcasts to added (B, H, n, K, V); first (B, H, K, V).
ChunkStates scan_chunks(const at::Tensor& decay_BHn, const at::Tensor& added_BHnKV, const at::Tensor& first_BHKV);

}  // namespace fox::ops
