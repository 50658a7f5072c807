#pragma once

// What the kernels of the backward pass share: see forgetting_attn_bwd_sm90.cuh for the algorithm.

#include <cuda.h>

#include "kernels/cuda/forgetting_attn_prefix.h"

namespace fox::cuda {

/// Tables of per-row values are padded to whole tiles of this many rows.
constexpr int kRowTile = 128;
/// How the gates reach the scores. Up to D = 64 a thread adds u_i + b_j. Above, where the tensor cores have more to do
/// in a tile anyway, they come in as one more k16 step of K Q^T: row i of the side of Q is (1, 1, 1, hi, mid, lo, 0, 0)
/// in bf16 with hi + mid + lo = u_i / σ, row j of the side of K (hi, mid, lo, 1, 1, 1, 0, 0) of b_j / σ.
__host__ __device__ constexpr bool bias_by_mma(bool gate, int head_dim) { return gate && head_dim > 64; }
/// Floats of a tile's row biases, u_i or such rows; behind them cref_m·log2e as hi + lo and 8 bytes of padding.
__host__ __device__ constexpr int row_table_floats(bool by_mma, int tile_rows) {
  return (by_mma ? tile_rows * 4 : tile_rows) + 4;
}
/// At D = 64 a tile has twice the scores that it has above for the same products, and the tensor cores have time left.
/// They subtract Δ from dP, as one more k16 step of V dO^T (rows (hi, mid, lo, 0 ...) of -Δ_i against (1, 1, 1, 0
/// ...)), and for bfloat16 add dS up for dlog_f, as 8 more columns of K and Q that are ones; dlog_f is then of dS as
/// rounded to 16 bits, as dQ and dK are. (Below, such columns would not stand beside a panel of K but in it.)
__host__ __device__ constexpr bool sums_by_mma(int head_dim) { return head_dim == 64; }
/// Floats of Δ of a row, or of such rows.
__host__ __device__ constexpr int delta_floats(int head_dim) { return sums_by_mma(head_dim) ? 4 : 1; }
/// Stands for -inf there, where inf - inf must not arise.
constexpr float kNoWeight = -1e30f;

/// Queries whose dS are summed together for dlog_f, by the SM90 and by the SM80 kernels.
constexpr int kResidualRows = 8, kResidualRowsSm80 = 1;
/// Positions of a part of dlog_f, from the end on: what a thread block writes of some heads.
constexpr int kGatePart = 256;
__host__ __device__ constexpr int gate_parts(int key_len) { return (key_len + kGatePart - 1) / kGatePart; }
/// Bits of a part's sum that is not there yet: a NaN that no sum is.
constexpr uint64_t kNoPartSum = ~uint64_t{0};

/// Arguments of all backward kernels.
struct BackwardArgs {
  CUtensorMap map_q, map_k, map_v, map_do, map_dk, map_dv;
  FoxTensor o, d_o, d_q;
  FoxGates log_f, d_log_f;
  const float* lse;  // (batch, heads, query_len)
  const int64_t* seq_start;
  const int64_t* cu_seqlens;
  ForgettingAttnPrefix prefix;
  int32_t batch, heads, kv_heads, group, query_len, key_len, head_dim, window, num_documents;
  int32_t offset;         // position of query 0: key_len - query_len
  int32_t padded_rows;    // query_len rounded up to kRowTile
  int32_t section_heads;  // heads that run side by side
  int32_t multiprocessors;
  int32_t deterministic;
  float scale, sigma;  // sigma = scale·log2e
  // Workspace, each by (batch, head) first:
  float* row_bias;      // per tile of rows: row_table_floats()
  float* delta;         // (padded_rows × delta_floats()): Δ = Σ_d o dO, or rows of -Δ
  float* dq_sum;        // (padded_rows × kHeadDim), each tile in the order of the accumulators
  double* part_sums;    // (gate_parts()): what the positions of each part add to dlog_f; kNoPartSum: not known yet
  float* row_residual;  // (padded_rows / kResidualRows): Σ_j dS_ij over so many queries
  float* column_sum;    // (key_len): Σ_i dS_ij
  int* dq_turn;         // per tile: key blocks added so far; NULL unless deterministic
};

/// Prefixes of one head, c_j·log2e.
struct GatePrefix {
  const float* r;
  const float2* block;
  __device__ __forceinline__ GatePrefix(const BackwardArgs& a, int batch, int head) {
    const int64_t row = (int64_t{batch} * a.heads + head) * a.prefix.key_blocks;
    r = a.prefix.r + row * kBiasBlock;
    block = a.prefix.block + row;
  }
  __device__ __forceinline__ double operator()(int key) const {
    const float2 before = block[key / kBiasBlock];
    return double{before.x} + before.y + r[key / kBiasBlock * kBiasBlock + bias_slot(key % kBiasBlock)];
  }
};

/// Head sizes that have a kernel; others run padded to the next one.
constexpr int kBackwardHeadDims[] = {32, 64, 96, 128, 256};
/// Keys of a block, and queries of a tile.
constexpr int backward_block_keys(int head_dim) { return head_dim <= 128 ? 128 : 64; }
constexpr int backward_tile_rows(int head_dim) { return head_dim <= 64 ? 128 : 64; }
/// Keys of dK and dV that one copy sends: a warpgroup's.
constexpr int kBackwardKeyRows = 64;

template <typename T, int kHeadDim>
cudaError_t launch_backward(const BackwardArgs& a, cudaStream_t stream);  // forgetting_attn_bwd_sm90_*.cu

/// Before: Δ, row biases, zeroed sums. After: dQ from its sums, dlog_f. (forgetting_attn_bwd_prepost.cu)
cudaError_t launch_backward_preprocess(const BackwardArgs& a, int dtype, int tile_rows, int padded_dim,
                                       cudaStream_t stream);
cudaError_t launch_backward_postprocess(const BackwardArgs& a, int dtype, int padded_dim, cudaStream_t stream);
/// The second half of that alone, from the sums of the SM80 kernels: `rows` as row_residual, `columns` as column_sum.
cudaError_t launch_gate_gradient(const BackwardArgs& a, const double* rows, const double* columns, cudaStream_t stream);

}  // namespace fox::cuda
