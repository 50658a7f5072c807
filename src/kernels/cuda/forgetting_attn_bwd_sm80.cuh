#pragma once

// Backward pass for SM80 and float32: dQ with the row sums of dS, then dK and dV with its column sums; see
// forgetting_attn_sm80.cuh. P = ex2(σ s + u_i - c_j) with u_i = (c_i - LSE_i)·log2e, dS = P (dP - Δ).

#include "kernels/cuda/forgetting_attn_fwd_sm80.cuh"

namespace fox::cuda {

/// A sum of dS over a tile, on its way to float64. dlog_f adds these sums up over the whole sequence, rows minus
/// columns, of which all but what flows across a gate cancels, while roundings of the one and the other do not. So
/// float32 keeps what its additions round away (Knuth's TwoSum), with no need for float64's unit; beside operands of 16
/// bits they are nothing.
template <typename T>
struct TileSum {
  float high = 0.f, low = 0.f;
  __device__ __forceinline__ void add(float x) {
    const float sum = __fadd_rn(high, x);  // never one operation with the product that x is
    if constexpr (std::is_same_v<T, float>) {
      const float added = sum - high;
      low += (high - (sum - added)) + (x - added);
    }
    high = sum;
  }
  __device__ __forceinline__ double total() const { return double{high} + low; }
};

template <typename T, int kD>
struct QueryGradientSm80 {
  using Tile = BackwardTileSm80<sizeof(T), kD>;
  static constexpr int kN = Tile::kColumns, kM = 16 * Tile::kWarps, kRow = kD + kPadding<T>;
  struct Shared {
    alignas(16) T q[kM * kRow];
    alignas(16) T d_o[kM * kRow];
    StreamBuffers<T, kD, kN, Tile::kStages, float2> keys;  // K, V, prefixes
    alignas(16) float scratch[Tile::kWarps][kScratch<T, kN> + 4];
  };

  const Sm80Args& a;
  Shared& smem;
  const int warp, lane;

  /// s to dS, given dP; adds up its rows.
  __device__ __forceinline__ void score_gradient(float (&s)[kN / 8][4], const float (&dp)[kN / 8][4],
                                                 const float4 (&row)[2], double (&sum)[2], const float2* table,
                                                 int position0, int key0, bool is_masked) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      TileSum<T> tile_sum;
#pragma unroll
      for (int g = 0; g < kN / 8; ++g) {
        const float4 c = *reinterpret_cast<const float4*>(table + 8 * g + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& t = s[g][2 * half + e];
          t = fmaf(t, a.sigma, pair_difference({row[half].x, row[half].y}, e ? float2{c.z, c.w} : float2{c.x, c.y}));
          const int key = key0 + 8 * g + lane % 4 * 2 + e;
          if (is_masked && (key > position0 + 8 * half || key < __float_as_int(row[half].w))) t = -INFINITY;
          t = ptx::ex2(t) * (dp[g][2 * half + e] - row[half].z);
          tile_sum.add(t);
        }
      }
      sum[half] += tile_sum.total();
    }
  }

  __device__ __forceinline__ void run() {
    const int tiles = (a.query_len + kM - 1) / kM;
    const int64_t head_row = blockIdx.x / tiles;
    const int m = tiles - 1 - blockIdx.x % tiles, row0 = m * kM;
    const int b = head_row / a.heads, h = head_row % a.heads, kv = h / a.group, low = padding_of(a, b);
    const int last = min(row0 + kM, a.query_len) - 1 + a.offset;
    const int begin = a.prefix.key_begin[head_row * a.prefix.query_blocks + row0 / kBiasBlock] * kBiasBlock / kN;
    const int end = last < 0 ? 0 : min(last, a.key_len - 1) / kN + 1;
    const int own = row0 + warp * 16 + lane / 4;
    load_rows<kM, kD>(smem.q, head_of<T>(a.q, b, h), a.q.stride_t, row0, low - a.offset, a.query_len, a.head_dim);
    load_rows<kM, kD>(smem.d_o, head_of<T>(a.d_o, b, h), a.d_o.stride_t, row0, low - a.offset, a.query_len, a.head_dim);
    const float4* table = a.row_table + head_row * a.padded_rows;
    const float4 row[2] = {table[own], table[own + 8]};
    float dq[kD / 8][4];
    double sum[2] = {0., 0.};
    clear(dq);
    stream_tiles<Tile::kStages, kFarFirst<T>>(
        begin, end,
        [&](int n, int stage) {
          load_rows<kN, kD>(smem.keys.x[stage], head_of<T>(a.k, b, kv), a.k.stride_t, n * kN, low, a.key_len,
                            a.head_dim);
          load_rows<kN, kD>(smem.keys.y[stage], head_of<T>(a.v, b, kv), a.v.stride_t, n * kN, low, a.key_len,
                            a.head_dim);
          load_table<kN>(smem.keys.table[stage], a.key_prefix + head_row * a.padded_keys + n * kN);
        },
        [&](int n, int stage) {
          float s[kN / 8][4], dp[kN / 8][4];
          multiply_rows<kN, kD>(s, smem.q + warp * 16 * kRow, smem.keys.x[stage]);
          multiply_rows<kN, kD>(dp, smem.d_o + warp * 16 * kRow, smem.keys.y[stage]);
          score_gradient(s, dp, row, sum, smem.keys.table[stage], own + a.offset, n * kN,
                         a.prefix.lower != nullptr || n * kN + kN - 1 > row0 + warp * 16 + a.offset);
          accumulate<kN, kD>(dq, s, smem.keys.x[stage], smem.scratch[warp]);
        });
    const float factor[2] = {a.scale, a.scale};
    store_rows<kD>(dq, factor, head_of<T>(a.d_q, b, h), a.d_q.stride_t, row0 + warp * 16, a.query_len, a.head_dim);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const double total = sum_of_row(sum[half]);
      if (lane % 4 == 0) a.row_sum[head_row * a.padded_rows + own + 8 * half] = total;
    }
  }
};

template <typename T, int kD>
struct KeyGradientSm80 {
  using Tile = BackwardTileSm80<sizeof(T), kD>;
  static constexpr int kN = Tile::kColumns, kM = 16 * Tile::kWarps, kRow = kD + kPadding<T>;
  struct Shared {
    alignas(16) T k[kM * kRow];
    alignas(16) T v[kM * kRow];
    StreamBuffers<T, kD, kN, Tile::kStages, float4> queries;  // Q, dO, row table
    alignas(16) float scratch[Tile::kWarps][kScratch<T, kN> + 4];
  };

  const Sm80Args& a;
  Shared& smem;
  const int warp, lane;
  int key0, b, kv_head, low;

  /// s to P.
  __device__ __forceinline__ void probabilities(float (&s)[kN / 8][4], const float2 (&prefix)[2], const float4* table,
                                                int own_key, int position0, bool is_masked) const {
#pragma unroll
    for (int g = 0; g < kN / 8; ++g)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * g + lane % 4 * 2 + e;
        const float4 row = table[column];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& t = s[g][2 * half + e];
          t = fmaf(t, a.sigma, pair_difference({row.x, row.y}, prefix[half]));
          const int key = own_key + 8 * half;
          if (is_masked && (key > position0 + column || key < __float_as_int(row.w))) t = -INFINITY;
          t = ptx::ex2(t);
        }
      }
  }

  /// dP to dS, given P; adds up its rows, which are columns of the scores.
  __device__ __forceinline__ void score_gradient(float (&ds)[kN / 8][4], const float (&p)[kN / 8][4],
                                                 const float4* table, double (&sum)[2]) const {
    TileSum<T> tile_sum[2];
#pragma unroll
    for (int g = 0; g < kN / 8; ++g)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ds[g][e] = p[g][e] * (ds[g][e] - table[8 * g + lane % 4 * 2 + e % 2].z);
        tile_sum[e / 2].add(ds[g][e]);
      }
    sum[0] += tile_sum[0].total(), sum[1] += tile_sum[1].total();
  }

  __device__ __forceinline__ void store_column_sums(const double (&sum)[2], int64_t head_row, int own_key) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const double total = sum_of_row(sum[half]);
      const int key = own_key + 8 * half;
      if (lane % 4 == 0 && key < a.key_len) a.column_sum[head_row * a.key_len + key] = total;
    }
  }

  /// The queries of all heads of the group, for dV, dK or both: two accumulators of a wide head do not fit at once.
  template <bool kValues, bool kKeys>
  __device__ __forceinline__ void pass(float (&dv)[kD / 8][4], float (&dk)[kD / 8][4]) {
    const int own_key = key0 + warp * 16 + lane / 4;
    const int m_begin = max(0, max(key0, low) - a.offset) / kN;
    for (int h = kv_head * a.group; h < (kv_head + 1) * a.group; ++h) {
      const int64_t head_row = int64_t(b) * a.heads + h;
      const float2* of_key = a.key_prefix + head_row * a.padded_keys + own_key;
      const float2 prefix[2] = {of_key[0], of_key[8]};
      const int rows =
          min(a.query_len, a.prefix.query_end[head_row * a.prefix.key_blocks + key0 / kBiasBlock] * kBiasBlock);
      double sum[2] = {0., 0.};
      stream_tiles<Tile::kStages, !kFarFirst<T>>(
          m_begin, (rows + kN - 1) / kN,
          [&](int m, int stage) {
            load_rows<kN, kD>(smem.queries.x[stage], head_of<T>(a.q, b, h), a.q.stride_t, m * kN, low - a.offset,
                              a.query_len, a.head_dim);
            load_rows<kN, kD>(smem.queries.y[stage], head_of<T>(a.d_o, b, h), a.d_o.stride_t, m * kN, low - a.offset,
                              a.query_len, a.head_dim);
            load_table<kN>(smem.queries.table[stage], a.row_table + head_row * a.padded_rows + m * kN);
          },
          [&](int m, int stage) {
            const float4* table = smem.queries.table[stage];
            float p[kN / 8][4];
            multiply_rows<kN, kD>(p, smem.k + warp * 16 * kRow, smem.queries.x[stage]);
            probabilities(p, prefix, table, own_key, m * kN + a.offset,
                          a.prefix.lower != nullptr || m * kN + a.offset < key0 + warp * 16 + 15);
            if constexpr (kValues) accumulate<kN, kD>(dv, p, smem.queries.y[stage], smem.scratch[warp]);
            if constexpr (kKeys) {
              float ds[kN / 8][4];
              multiply_rows<kN, kD>(ds, smem.v + warp * 16 * kRow, smem.queries.y[stage]);
              score_gradient(ds, p, table, sum);
              accumulate<kN, kD>(dk, ds, smem.queries.x[stage], smem.scratch[warp]);
            }
          });
      if constexpr (kKeys) store_column_sums(sum, head_row, own_key);
    }
  }

  __device__ __forceinline__ void run() {
    const int blocks = (a.key_len + kM - 1) / kM, head = blockIdx.x / blocks;
    key0 = blockIdx.x % blocks * kM;  // longest first
    b = head / a.kv_heads, kv_head = head % a.kv_heads, low = padding_of(a, b);
    load_rows<kM, kD>(smem.k, head_of<T>(a.k, b, kv_head), a.k.stride_t, key0, low, a.key_len, a.head_dim);
    load_rows<kM, kD>(smem.v, head_of<T>(a.v, b, kv_head), a.v.stride_t, key0, low, a.key_len, a.head_dim);
    const float one[2] = {1.f, 1.f}, scale[2] = {a.scale, a.scale};
    const auto store = [&](const float(&x)[kD / 8][4], const float(&factor)[2], const FoxTensor& out) {
      store_rows<kD>(x, factor, head_of<T>(out, b, kv_head), out.stride_t, key0 + warp * 16, a.key_len, a.head_dim);
    };
    if constexpr (kD <= 128) {
      float dv[kD / 8][4], dk[kD / 8][4];
      clear(dv), clear(dk);
      pass<true, true>(dv, dk);
      store(dv, one, a.d_v);
      store(dk, scale, a.d_k);
    } else {
      float sum[kD / 8][4];
      clear(sum);
      pass<true, false>(sum, sum);
      store(sum, one, a.d_v);
      clear(sum);
      pass<false, true>(sum, sum);
      store(sum, scale, a.d_k);
    }
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(32 * Kernel::Tile::kWarps)
    forgetting_attn_bwd_sm80_kernel(const __grid_constant__ Sm80Args a) {
  extern __shared__ __align__(16) char raw[];
  Kernel{a, *reinterpret_cast<typename Kernel::Shared*>(raw), int(threadIdx.x / 32), int(threadIdx.x % 32)}.run();
}

template <typename T, int kHeadDim>
cudaError_t launch_backward_sm80(const Sm80Args& a, cudaStream_t stream) {
  using Query = QueryGradientSm80<T, kHeadDim>;
  using Key = KeyGradientSm80<T, kHeadDim>;
  constexpr int kWarps = Query::Tile::kWarps;
  const cudaError_t error = launch_sm80<Query, Query::kM, kWarps>(forgetting_attn_bwd_sm80_kernel<Query>, a,
                                                                  a.query_len, int64_t(a.batch) * a.heads, stream);
  if (error != cudaSuccess) return error;
  return launch_sm80<Key, Key::kM, kWarps>(forgetting_attn_bwd_sm80_kernel<Key>, a, a.key_len,
                                           int64_t(a.batch) * a.kv_heads, stream);
}

}  // namespace fox::cuda
