#pragma once

// Forgetting attention on NVIDIA GPUs, forward and backward, without torch: pointers, strides and a stream.
//
//   o_i = Σ_j softmax_j(q_i·k_j * scale + D_ij) v_j,   D_ij = Σ_{l=j+1..i} log_f_l  (arXiv 2503.02130, eq. 3 to 5)
//
// Query row i stands at position p = i + key_len - query_len and sees the keys lower(p) <= j <= p, where lower comes
// from the window, the left padding and the document boundaries. A row that sees no key gives o = 0, lse = -inf.

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

extern "C" {

enum FoxDtype : int32_t { kFoxBfloat16 = 0, kFoxFloat16 = 1, kFoxFloat32 = 2 };

/// A (batch, time, head, head_dim) tensor. Strides count elements; the last dimension is contiguous. `data` and the
/// strides (times the size of an element) must be multiples of 16 bytes; strides of dimensions of size 1 are ignored.
struct FoxTensor {
  void* data;
  int64_t stride_b, stride_t, stride_h;
};
/// A float32 (batch, time, head) tensor of any strides.
struct FoxGates {
  float* data;
  int64_t stride_b, stride_t, stride_h;
};

/// Everything that forward and backward need. All pointers are device pointers; zero-initialise, then fill.
struct ForgettingAttnParams {
  int32_t dtype;  ///< FoxDtype of q, k, v, o and their gradients
  int32_t batch, query_len, key_len, query_heads, kv_heads, head_dim;
  FoxTensor q, k, v;          ///< q: query_len, query_heads; k, v: key_len, kv_heads (a divisor of query_heads)
  FoxTensor o;                ///< written by forward, read by backward
  void* lse;                  ///< (batch, query_heads, query_len), packed: natural log-sum-exp of each row, float32,
                              ///< or float64 if dtype is kFoxFloat32
  FoxGates log_f;             ///< key_len, query_heads: one gate per query head, <= 0; data = NULL: plain attention
  FoxTensor d_o;              ///< backward: gradient of o
  FoxTensor d_q, d_k, d_v;    ///< backward: written
  FoxGates d_log_f;           ///< backward: written unless data is NULL
  float scale;                ///< logits are q·k * scale; positive
  int32_t window;             ///< keys p - window < j <= p; 0: all j <= p
  const int64_t* seq_start;   ///< (batch): number of left-padding keys; NULL: none
  const int64_t* cu_seqlens;  ///< (num_documents + 1), batch = 1, query_len = key_len; NULL: one document
  int32_t num_documents;
  int32_t pruned;            ///< 1: skip blocks whose weights sum to at most exp(log_tolerance) over a row
  float log_tolerance;       ///< ln ε; needs logit_bound
  const float* logit_bound;  ///< (query_heads): upper bound of |q·k * scale|; NULL: unknown. A small one also spares
                             ///< the forward pass its running maximum
  int32_t deterministic;     ///< backward: sums in a fixed order
  void* workspace;           ///< as many bytes as the functions below say, 256-byte aligned
  size_t workspace_bytes;
  int32_t use_sm80_kernels;  ///< 1: those for SM80 also on a GPU that has faster ones, to test or compare them
  /// A word that the device can write: where some log_f[batch, time, head] is above 0 or NaN it becomes
  /// 1 << 63 | batch << 48 | head << 32 | time (15, 16 and 32 bits), else it is left alone. The row's outputs from
  /// there on are NaN, those of up to 127 rows before may be. NULL: not wanted
  uint64_t* bad_gate;
};

/// Bytes of workspace that a forward or backward call with these params needs; its contents need not survive between
/// calls. 0 if the params are not supported: call the entry point for the reason.
size_t fox_forgetting_attn_forward_workspace(const ForgettingAttnParams* params);
size_t fox_forgetting_attn_backward_workspace(const ForgettingAttnParams* params);

/// Both return 0, or an error whose text fox_kernels_last_error() gives. They only enqueue work on `stream`.
int fox_forgetting_attn_forward(const ForgettingAttnParams* params, cudaStream_t stream);
int fox_forgetting_attn_backward(const ForgettingAttnParams* params, cudaStream_t stream);

/// What was wrong with this thread's last call that failed.
const char* fox_kernels_last_error(void);

}  // extern "C"
