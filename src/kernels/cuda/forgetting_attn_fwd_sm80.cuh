#pragma once

// Forward pass for SM80 and float32; see forgetting_attn_sm80.cuh.

#include "kernels/cuda/forgetting_attn_sm80.cuh"

namespace fox::cuda {

template <typename T, int kD>
struct ForwardSm80 {
  using Tile = ForwardTileSm80<sizeof(T), kD>;
  static constexpr int kN = Tile::kColumns, kM = 16 * Tile::kWarps, kRow = kD + kPadding<T>;
  struct Shared {
    alignas(16) T q[kM * kRow];
    StreamBuffers<T, kD, kN, Tile::kStages, float2> keys;  // K, V, prefixes
    alignas(16) float scratch[Tile::kWarps][kScratch<T, kN> + 4];
  };

  const Sm80Args& a;
  Shared& smem;
  const int warp, lane;
  float2 prefix[2];           // c_i of this thread's rows
  int position[2], lower[2];  // and which keys they see
  float top[2], sum[2];

  __device__ __forceinline__ void load_row(int half, int64_t head_row, int b, int row) {
    position[half] = row + a.offset;
    const bool exists = row < a.query_len && position[half] >= 0;
    prefix[half] = exists ? a.key_prefix[head_row * a.padded_keys + position[half]] : float2{0.f, 0.f};
    lower[half] = exists && a.prefix.lower ? a.prefix.lower[int64_t(b) * a.query_len + row] : 0;
    top[half] = -INFINITY, sum[half] = 0.f;
  }

  /// Scores of the tile from key0 on to weights; O is scaled when a row's maximum grows.
  __device__ __forceinline__ void softmax(float (&s)[kN / 8][4], float (&o)[kD / 8][4], const float2* table, int key0,
                                          bool is_masked) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = top[half];
#pragma unroll
      for (int g = 0; g < kN / 8; ++g) {
        const float4 c = *reinterpret_cast<const float4*>(table + 8 * g + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& t = s[g][2 * half + e];
          t = fmaf(t, a.sigma, pair_difference(prefix[half], e ? float2{c.z, c.w} : float2{c.x, c.y}));
          const int key = key0 + 8 * g + lane % 4 * 2 + e;
          if (is_masked && (key > position[half] || key < lower[half])) t = -INFINITY;
          highest = fmaxf(highest, t);
        }
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float base = highest == -INFINITY ? 0.f : highest;
      const float alpha = ptx::ex2(top[half] - base);
      top[half] = highest;
      sum[half] *= alpha;
#pragma unroll
      for (int g = 0; g < kN / 8; ++g)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& t = s[g][2 * half + e];
          t = ptx::ex2(t - base);
          sum[half] += t;
        }
      if (__any_sync(0xffffffffu, alpha != 1.f)) {
#pragma unroll
        for (int g = 0; g < kD / 8; ++g) o[g][2 * half] *= alpha, o[g][2 * half + 1] *= alpha;
      }
    }
  }

  __device__ __forceinline__ void run() {
    using Lse = typename LseType<T>::type;
    const int tiles = (a.query_len + kM - 1) / kM;
    const int64_t head_row = blockIdx.x / tiles;
    const int m = tiles - 1 - blockIdx.x % tiles, row0 = m * kM;  // longest first
    const int b = head_row / a.heads, h = head_row % a.heads, kv = h / a.group, low = padding_of(a, b);
    const int last = min(row0 + kM, a.query_len) - 1 + a.offset;
    const int begin = a.prefix.key_begin[head_row * a.prefix.query_blocks + row0 / kBiasBlock] * kBiasBlock / kN;
    const int end = last < 0 ? 0 : min(last, a.key_len - 1) / kN + 1;
    load_rows<kM, kD>(smem.q, head_of<T>(a.q, b, h), a.q.stride_t, row0, low - a.offset, a.query_len, a.head_dim);
    load_row(0, head_row, b, row0 + warp * 16 + lane / 4);
    load_row(1, head_row, b, row0 + warp * 16 + lane / 4 + 8);
    float o[kD / 8][4];
    clear(o);
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
          float s[kN / 8][4];
          multiply_rows<kN, kD>(s, smem.q + warp * 16 * kRow, smem.keys.x[stage]);
          softmax(s, o, smem.keys.table[stage], n * kN,
                  a.prefix.lower != nullptr || n * kN + kN - 1 > row0 + warp * 16 + a.offset);
          accumulate<kN, kD>(o, s, smem.keys.y[stage], smem.scratch[warp]);
        });
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float total = sum_of_row(sum[half]);
      factor[half] = total == 0.f ? 0.f : 1.f / total;  // NaN stays NaN
      const int row = row0 + warp * 16 + lane / 4 + 8 * half;
      if (lane % 4 == 0 && row < a.query_len)
        static_cast<Lse*>(a.lse)[head_row * a.query_len + row] =
            total == 0.f ? -Lse(INFINITY) : (Lse(top[half]) + log2(Lse(total))) * Lse(0.69314718055994531);
    }
    store_rows<kD>(o, factor, head_of<T>(a.o, b, h), a.o.stride_t, row0 + warp * 16, a.query_len, a.head_dim);
  }
};

template <typename T, int kD>
__global__ void __launch_bounds__(32 * ForwardTileSm80<sizeof(T), kD>::kWarps)
    forgetting_attn_fwd_sm80_kernel(const __grid_constant__ Sm80Args a) {
  extern __shared__ __align__(16) char raw[];
  using Kernel = ForwardSm80<T, kD>;
  Kernel{a, *reinterpret_cast<typename Kernel::Shared*>(raw), int(threadIdx.x / 32), int(threadIdx.x % 32)}.run();
}

/// A kernel with its shared memory, one block a tile of kRows rows of each of `heads` heads.
template <typename Kernel, int kRows, int kWarps>
cudaError_t launch_sm80(void (*kernel)(Sm80Args), const Sm80Args& a, int rows, int64_t heads, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Kernel::Shared);
  static_assert(kBytes <= 99 * 1024, "SM86, SM89 and SM120 have 99 KB a block");
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>((rows + kRows - 1) / kRows * heads), 32 * kWarps, kBytes, stream>>>(a);
  return cudaGetLastError();
}

template <typename T, int kHeadDim>
cudaError_t launch_forward_sm80(const Sm80Args& a, cudaStream_t stream) {
  using Kernel = ForwardSm80<T, kHeadDim>;
  return launch_sm80<Kernel, Kernel::kM, Kernel::Tile::kWarps>(forgetting_attn_fwd_sm80_kernel<T, kHeadDim>, a,
                                                               a.query_len, int64_t(a.batch) * a.heads, stream);
}

}  // namespace fox::cuda
