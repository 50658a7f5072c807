#pragma once

// Forgetting attention from mma.sync and cp.async, for SM80 and later, and for float32 by FFMA: what its three kernels
// share. The fast kernels of a Hopper are forgetting_attn_*_sm90.cuh; these are for correctness on everything else and
// for memory linear in the length, with plain loops that are easy to follow.
//
// All three kernels have one shape. A warp owns 16 rows of a thread block's tile, which stays in shared memory, and
// tiles of columns stream past in one or two stages:
//   forward   rows = queries, columns = keys:     S = Q K^T, O += P V
//   dQ        rows = queries, columns = keys:     S, dP = dO V^T, dQ += dS K, row sums of dS
//   dK, dV    rows = keys,    columns = queries:  S^T, dV += P^T dO, dP^T, dK += dS^T Q, column sums of dS
// Each is a product of rows with rows (`multiply_rows`), arithmetic on the accumulators, and a product of those with
// the streamed rows (`accumulate`). Computing S and dP twice in the backward costs two products of seven and spares
// atomics, so gradients are the same bits every time. Accumulators are m16n8 blocks: element 4 g + {0, 1, 2, 3} of a
// thread is row r, columns 8g + 2q, + 1, then row r + 8, with r = lane / 4 and q = lane % 4; float32 keeps that layout.
//
// Gates come in as differences of hi + lo pairs for every element: (u - c).hi + (u - c).lo, 48 bits that lose nothing
// wherever the two lie, at three additions an element. Without gates c is 0 and the arithmetic the same.

#include "kernels/cuda/forgetting_attn_sm80.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/tiles.h"

namespace fox::cuda {

/// Rows in shared memory are padded by 16 bytes: eight of them then lie in eight different groups of banks.
template <typename T>
constexpr int kPadding = 16 / sizeof(T);

template <typename T>
struct LseType {
  using type = float;
};
template <>
struct LseType<float> {
  using type = double;
};

// ---------------------------------------------------------------------------------------------------------- loads

/// Starts copying rows first .. first + kRows - 1 of (time, head_dim) `src` to shared memory; rows outside [low,
/// length) and columns behind head_dim become 0.
template <int kRows, int kD, typename T>
__device__ __forceinline__ void load_rows(T* dst, const T* src, int64_t stride, int first, int low, int length,
                                          int head_dim) {
  constexpr int kVector = 16 / sizeof(T), kChunks = kD / kVector;
  for (int i = threadIdx.x; i < kRows * kChunks; i += blockDim.x) {
    const int row = i / kChunks, column = i % kChunks * kVector, at = first + row;
    const bool valid = at >= low && at < length && column < head_dim;
    ptx::copy_async_16(ptx::smem_u32(dst + row * (kD + kPadding<T>)+column), src + (valid ? at * stride + column : 0),
                       valid);
  }
}

/// Starts copying kCount entries of a padded table.
template <int kCount, typename Entry>
__device__ __forceinline__ void load_table(Entry* dst, const Entry* src) {
  constexpr int kEntries = 16 / sizeof(Entry);
  static_assert(kCount % kEntries == 0);
  for (int i = threadIdx.x; i < kCount / kEntries; i += blockDim.x)
    ptx::copy_async_16(ptx::smem_u32(dst + i * kEntries), src + i * kEntries, true);
}

/// Rows of one (batch, head).
template <typename T>
__device__ __forceinline__ T* head_of(const FoxTensor& x, int b, int h) {
  return static_cast<T*>(x.data) + b * x.stride_b + h * x.stride_h;
}

/// Two streams of rows with a table beside them.
template <typename T, int kD, int kN, int kStages, typename Entry>
struct StreamBuffers {
  alignas(16) T x[kStages][kN * (kD + kPadding<T>)];
  alignas(16) T y[kStages][kN * (kD + kPadding<T>)];
  alignas(16) Entry table[kStages][kN];
};

/// Whether the tiles furthest from a row come first. Gates make weights decay with distance, and a float32 sum that
/// begins with the large ones rounds each small one at its own size, which made the error of o 1.5 times the naive one.
/// 16-bit weights are rounded more than that; there the near tiles come first, so that a row's maximum seldom grows,
/// which saves 1 to 2 % of the time.
template <typename T>
constexpr bool kFarFirst = std::is_same_v<T, float>;

/// Calls load(tile, stage) and then body(tile, stage) for tiles [begin, end), upwards or downwards; with two stages the
/// next tile is on its way during the body. Everything that the threads started to copy before has arrived when the
/// first body runs.
template <int kStages, bool kUpwards, typename Load, typename Body>
__device__ __forceinline__ void stream_tiles(int begin, int end, const Load& load, const Body& body) {
  static_assert(kStages == 1 || kStages == 2);
  constexpr int kStep = kUpwards ? 1 : -1;
  const int first = kUpwards ? begin : end - 1, count = end - begin;
  if (count > 0) load(first, 0);
  ptx::copy_async_commit();
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    if (kStages == 2) {
      if (i + 1 < count) load(first + (i + 1) * kStep, (i + 1) % 2);
      ptx::copy_async_commit();
      ptx::copy_async_wait<1>();
    } else {
      ptx::copy_async_wait<0>();
    }
    __syncthreads();
    body(first + i * kStep, i % kStages);
    __syncthreads();
    if (kStages == 1) {
      if (i + 1 < count) load(first + (i + 1) * kStep, 0);
      ptx::copy_async_commit();
    }
  }
}

// ------------------------------------------------------------------------------------------------------- products

/// Shared memory that a warp needs for `accumulate`, in elements: float32 passes its weights through it.
template <typename T, int kN>
constexpr int kScratch = std::is_same_v<T, float> ? 16 * (kN + kPadding<T>) : 0;

/// s = (16 rows at `rows`) · (kN rows at `columns`)^T over kD.
template <int kN, int kD, typename T>
__device__ __forceinline__ void multiply_rows(float (&s)[kN / 8][4], const T* rows, const T* columns) {
  constexpr int kRow = kD + kPadding<T>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int g = 0; g < kN / 8; ++g)
#pragma unroll
    for (int e = 0; e < 4; ++e) s[g][e] = 0.f;
  if constexpr (std::is_same_v<T, float>) {
    const float *a0 = rows + lane / 4 * kRow, *a1 = a0 + 8 * kRow, *b = columns + lane % 4 * 2 * kRow;
#pragma unroll 2
    for (int k = 0; k < kD; k += 4) {
      const float4 x0 = *reinterpret_cast<const float4*>(a0 + k), x1 = *reinterpret_cast<const float4*>(a1 + k);
      const auto dot = [](float sum, float4 x, float4 y) {
        return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum))));
      };
#pragma unroll
      for (int g = 0; g < kN / 8; ++g) {
        const float4 y0 = *reinterpret_cast<const float4*>(b + 8 * g * kRow + k),
                     y1 = *reinterpret_cast<const float4*>(b + (8 * g + 1) * kRow + k);
        s[g][0] = dot(s[g][0], x0, y0), s[g][1] = dot(s[g][1], x0, y1);
        s[g][2] = dot(s[g][2], x1, y0), s[g][3] = dot(s[g][3], x1, y1);
      }
    }
  } else {
    const uint32_t a = ptx::smem_u32(rows + lane % 16 * kRow + lane / 16 * 8),
                   b = ptx::smem_u32(columns + (lane / 16 * 8 + lane % 8) * kRow + lane / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < kD; k += 16) {
      uint32_t x[4];
      ptx::ldmatrix_x4(x, a + k * 2);
#pragma unroll
      for (int g = 0; g < kN / 8; g += 2) {
        uint32_t y[4];
        ptx::ldmatrix_x4(y, b + (8 * g * kRow + k) * 2);
        ptx::mma<T>(s[g], x, y[0], y[1]);
        ptx::mma<T>(s[g + 1], x, y[2], y[3]);
      }
    }
  }
}

/// out += w · (kN rows at `columns`), w 16 × kN in accumulators; 16-bit types round it.
template <int kN, int kD, typename T>
__device__ __forceinline__ void accumulate(float (&out)[kD / 8][4], const float (&w)[kN / 8][4], const T* columns,
                                           float* scratch) {
  constexpr int kRow = kD + kPadding<T>;
  const int lane = threadIdx.x % 32;
  if constexpr (std::is_same_v<T, float>) {
    constexpr int kScratchRow = kN + kPadding<T>;
    float* own = scratch + lane / 4 * kScratchRow;
#pragma unroll
    for (int g = 0; g < kN / 8; ++g) {
      *reinterpret_cast<float2*>(own + 8 * g + lane % 4 * 2) = {w[g][0], w[g][1]};
      *reinterpret_cast<float2*>(own + 8 * kScratchRow + 8 * g + lane % 4 * 2) = {w[g][2], w[g][3]};
    }
    __syncwarp();
#pragma unroll 2
    for (int k = 0; k < kN; ++k) {
      const float x0 = own[k], x1 = own[8 * kScratchRow + k];
#pragma unroll
      for (int g = 0; g < kD / 8; ++g) {
        const float2 y = *reinterpret_cast<const float2*>(columns + k * kRow + 8 * g + lane % 4 * 2);
        out[g][0] = fmaf(x0, y.x, out[g][0]), out[g][1] = fmaf(x0, y.y, out[g][1]);
        out[g][2] = fmaf(x1, y.x, out[g][2]), out[g][3] = fmaf(x1, y.y, out[g][3]);
      }
    }
    __syncwarp();
  } else {
    const uint32_t b = ptx::smem_u32(columns + (lane / 8 % 2 * 8 + lane % 8) * kRow + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      const float(&left)[4] = w[k / 8], (&right)[4] = w[k / 8 + 1];
      const uint32_t x[4] = {ptx::pack2<T>(left[0], left[1]), ptx::pack2<T>(left[2], left[3]),
                             ptx::pack2<T>(right[0], right[1]), ptx::pack2<T>(right[2], right[3])};
#pragma unroll
      for (int g = 0; g < kD / 8; g += 2) {
        uint32_t y[4];
        ptx::ldmatrix_x4_trans(y, b + (k * kRow + 8 * g) * 2);
        ptx::mma<T>(out[g], x, y[0], y[1]);
        ptx::mma<T>(out[g + 1], x, y[2], y[3]);
      }
    }
  }
}

template <int kGroups>
__device__ __forceinline__ void clear(float (&x)[kGroups][4]) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g)
#pragma unroll
    for (int e = 0; e < 4; ++e) x[g][e] = 0.f;
}

// ---------------------------------------------------------------------------------------------------------- stores

template <typename T>
__device__ __forceinline__ void store_pair(T* to, float x, float y) {
  if constexpr (std::is_same_v<T, float>)
    *reinterpret_cast<float2*>(to) = {x, y};
  else
    *reinterpret_cast<uint32_t*>(to) = ptx::pack2<T>(x, y);
}

/// This warp's 16 rows, from row `first` of (time, head_dim) `out` on, row r times factor[r / 8]. A row of factor 0 is
/// 0 whatever it holds.
template <int kD, typename T>
__device__ __forceinline__ void store_rows(const float (&x)[kD / 8][4], const float (&factor)[2], T* out,
                                           int64_t stride, int first, int length, int head_dim) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + lane / 4 + 8 * half;
    if (row >= length) continue;
    T* to = out + row * stride + lane % 4 * 2;
    const float f = factor[half];
#pragma unroll
    for (int g = 0; g < kD / 8; ++g)
      if (8 * g < head_dim)
        store_pair(to + 8 * g, f == 0.f ? 0.f : x[g][2 * half] * f, f == 0.f ? 0.f : x[g][2 * half + 1] * f);
  }
}

/// Σ over the four lanes that share a row.
template <typename T>
__device__ __forceinline__ T sum_of_row(T x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/// Rows of the padding at the left of batch row b, in positions.
__device__ __forceinline__ int padding_of(const Sm80Args& a, int b) {
  return a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) : 0;
}

}  // namespace fox::cuda
