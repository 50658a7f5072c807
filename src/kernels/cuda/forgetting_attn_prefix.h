#pragma once

// The forget bias in a form that keeps its digits, and which blocks matter: made once by the scan kernel
// (forgetting_attn_scan.cu), read by forward and backward. All in units of log2, since the kernels exponentiate with
// ex2: c_j * log2(e) = block[j / 64] + r[j], where c_j = Σ_{l<=j} log_f_l.
//
// `r` is a float32 prefix that starts anew in every block of 64 keys; the prefix at the start of a block needs more
// than a float32 (one ulp of 1e5 is 8e-3, more than bf16's rounding of a weight), so it is a pair hi + lo of floats
// (48 bits). Differences of pairs cost three FADDs, differences of float64 would cost conversions on the unit that
// computes ex2.

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/forgetting_attn.h"

namespace fox::cuda {

constexpr int kBiasBlock = 64;

/// Gates below this are raised to it: exp(-1000) is 0 beside any weight that a float32 softmax can hold, while -inf
/// would turn later prefixes into NaN, and 64 gates of -1000 still leave r an ulp below 2^-6.
constexpr float kMinLogF = -1000.f;
constexpr double kLog2e = 1.4426950408889634;

/// Where key j % 64 of a block lies in its 64 entries of `r`: the four entries that one thread of an accumulator
/// layout needs (columns 8g + 2q, +1 of two adjacent groups g) are one 16-byte word.
__host__ __device__ constexpr int bias_slot(int key) {
  return (key & ~15) + ((key & 7) >> 1) * 4 + ((key >> 3) & 1) * 2 + (key & 1);
}

/// The bias of 128 keys as the forward pass adds it: with one more k16 step of Q K^T, so that the softmax need not know
/// of it. Row j holds (hi, mid, lo, x_0, x_1, x_2, x_3, 0) in bf16, with hi + mid + lo = b_j = (c_e - c_j) / scale <= 0
/// to 24 bits, e the last key of j's block of 64, where the keys that matter to later rows lie, and x_n = 1 for n the
/// number of the block modulo 4. On the side of Q stands (1, 1, 1, 0, 0, 0, 0, 0); near the diagonal row i also has -hi
/// of b_i in the place of its own block's x, which brings what matters there near 0.
struct alignas(128) BiasTile {
  uint4 row[2 * kBiasBlock];
  float4 end;  ///< hi, lo of the prefix at the ends of the two blocks
};

/// What is made of the gates of a block of 64 keys on its own, in units of log2.
struct alignas(16) BlockSums {
  float total;     ///< of the gates
  float mass;      ///< Σ_j 2^(c_e - c_j) over the keys j of the block that are not padding, e its last one
  float row;       ///< forward: c, from the block's start, of the query block's first row that stands in the block;
                   ///< backward: min_i (lse_i - c_i) over the rows that stand in it
  float row_mass;  ///< forward: Σ_j 2^(c_i - c_j) of that row over the keys of the block
};

enum class Pass : int32_t { kForward, kBackward };

/// ln of the share of a row below which it does not matter what the keys of far blocks weigh, all of them together:
/// 1/256 of what rounding may change a weight by, 2^-16 for bf16 and 2^-19 for fp16. Such blocks are not left out, but
/// their keys are taken to decay by more than they do: forward by all of c_i, backward as the first of their tile does,
/// where nothing is taken to flow from them to gates, either. That spares the kernels the biases of single keys and the
/// sums of dS.
__host__ __device__ constexpr float log_near_share(int32_t dtype) {
  return dtype == kFoxFloat16 ? -13.1698f : -11.0904f;
}

/// Whether the backward pass has a loop for far blocks at this head size, padded or not.
__host__ __device__ constexpr bool has_far_loop(int head_dim) { return head_dim > 32 && head_dim <= 128; }

/// Pointers into the workspace. Sizes: BH = batch * query_heads, key_blocks = ceil(key_len / 128) * 2 (so that 128-key
/// tiles find whole entries), query_blocks = ceil(query_len / 64). Blocks are of 64 keys or query rows throughout.
struct ForgettingAttnPrefix {
  int32_t* kept;        ///< (BH): number of (query block, key block) pairs kept, for sorting
  int32_t* key_begin;   ///< (BH, query_blocks): first key block that some row of the query block needs
  BlockSums* sums;      ///< (BH, key_blocks); NULL without gates
  float* r;             ///< (BH, key_blocks * 64), slots permuted by bias_slot; for backward on SM90, else NULL
  float2* block;        ///< (BH, key_blocks): hi, lo of the prefix before the block; for backward on SM90, else NULL
  BiasTile* bias;       ///< (BH, key_blocks / 2); for forward on SM90, else NULL
  int32_t* query_end;   ///< (BH, key_blocks): one past the last query block that needs the key block (0: none does);
                        ///< NULL for forward, whose tiles are of queries
  int32_t* near_begin;  ///< (BH, query_blocks): first key block that is not far (log_near_share) from some row of the
                        ///< query block; NULL: 0, since no bound of the logits is known or far blocks are pruned, and
                        ///< for backward
  int32_t* near_end;    ///< (BH, key_blocks): one past the last query block that the key block is not far from; NULL
                        ///< for forward, for the same reasons, and where it is not read (has_far_loop)
  int32_t* lower;       ///< (batch, query_len): first key that a row may see; NULL if always 0
  int32_t* head_order;  ///< (BH): b * query_heads + h, most kept blocks first; NULL: natural order
  float* marks;         ///< the scan's own, where they do not fit in shared memory
  int32_t* counters;    ///< (kCounters): zeroed by the scan; tiles taken forward, blocks of keys taken backward
  int32_t key_blocks, query_blocks;
  Pass pass;
};
constexpr int kCounters = 2;

/// Lays the prefix out from `workspace` on; returns the bytes used (a multiple of 256). Pointers are valid only if
/// workspace is not NULL. The backward pass puts its own buffers behind it.
size_t layout_prefix(const ForgettingAttnParams& params, void* workspace, ForgettingAttnPrefix* prefix, Pass pass);

/// Fills all of it. Returns cudaSuccess or the launch error. The kernels let the next one start early: see launch.h.
cudaError_t launch_prefix(const ForgettingAttnParams& params, const ForgettingAttnPrefix& prefix, cudaStream_t stream);

/// NULL if the params are sane, else what is wrong (shapes, dtype, strides, head size).
const char* check_params(const ForgettingAttnParams& params);

/// 10 * major + minor of the current device; 0 if there is none.
int compute_capability();
/// Of the current device; 0 if there is none.
int count_multiprocessors();

/// Stores the message for fox_kernels_last_error() and returns 1.
int fail(const char* message);
int fail(const char* where, cudaError_t error);

#ifdef __CUDACC__
/// A gate as the sums take it; NaN if it is no gate (above 0 or NaN), so that the result shows it.
__device__ __forceinline__ float usable_gate(float log_f) {
  return log_f <= 0.f ? fmaxf(log_f, kMinLogF) : __int_as_float(0x7fffffff);
}

/// a - b of two hi + lo pairs.
__device__ __forceinline__ float pair_difference(float2 a, float2 b) { return (a.x - b.x) + (a.y - b.y); }
#endif

}  // namespace fox::cuda
