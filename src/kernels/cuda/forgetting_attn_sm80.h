#pragma once

// Forgetting attention for GPUs from SM80 on and for float32 everywhere: see forgetting_attn_sm80.cuh.

#include "kernels/cuda/forgetting_attn_prefix.h"

namespace fox::cuda {

/// Arguments of all SM80 kernels. Tables are padded to whole blocks of 64 rows or keys.
struct Sm80Args {
  FoxTensor q, k, v, o, d_o, d_q, d_k, d_v;
  void* lse;           // (BH, query_len): float, or double with float32 inputs
  float2* key_prefix;  // (BH, padded_keys): c_j·log2e as hi + lo; (inf, 0) for keys that no row sees
  float4* row_table;   // backward (BH, padded_rows): (c_i - lse_i)·log2e as hi + lo, Δ_i, bits of the row's first key
  double* row_sum;     // backward (BH, padded_rows): Σ_j dS_ij
  double* column_sum;  // backward (BH, key_len): Σ_i dS_ij
  ForgettingAttnPrefix prefix;
  const int64_t* seq_start;
  int32_t batch, heads, kv_heads, group, query_len, key_len, head_dim;
  int32_t offset;  // position of query 0: key_len - query_len
  int32_t padded_rows, padded_keys;
  float scale, sigma;  // sigma = scale·log2e
  double* part_sums;   // backward: as in BackwardArgs
};

/// Head sizes that have kernels; others run padded to the next one.
constexpr int kSm80HeadDims[] = {64, 128, 256};

template <typename T, int kHeadDim>
cudaError_t launch_forward_sm80(const Sm80Args& a, cudaStream_t stream);  // forgetting_attn_sm80_*.cu
template <typename T, int kHeadDim>
cudaError_t launch_backward_sm80(const Sm80Args& a, cudaStream_t stream);

/// Whether these params run there on the current device.
bool runs_on_sm80_kernels(const ForgettingAttnParams& params);
/// Lays the workspace out; returns its size. Pointers are valid only if params.workspace is not NULL.
size_t layout_sm80(const ForgettingAttnParams& params, bool backward, Sm80Args* args);
/// Entry points of checked params, with errors as fox_forgetting_attn_forward and _backward give them.
int forward_sm80(const ForgettingAttnParams& params, cudaStream_t stream);
int backward_sm80(const ForgettingAttnParams& params, cudaStream_t stream);

}  // namespace fox::cuda
