#pragma once

// What the kernels of the linear recurrences share (docs/kernels.md, "The recurrent operators"): chunks of 64 tokens as
// bf16 tiles in shared memory, products of them by mma.sync m16n8k16, decays of a chunk as sums.
//
// Fragments (r = lane / 4, q = lane % 4): an accumulator d[4] of 16×8 holds rows r, r, r + 8, r + 8 and columns 2q,
// 2q + 1 of each; two neighbouring ones, packed to bf16, are the A operand of 16×16:
//   a[0] = row r, columns 2q, 2q + 1;   a[1] = row r + 8;   a[2] = row r, columns 2q + 8, + 9;   a[3] = row r + 8.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {

using bf16 = __nv_bfloat16;
constexpr int kChunk = 64;
constexpr float kLog2E = 1.4426950408889634f;

__host__ __device__ constexpr int64_t chunks_of(int64_t length) { return (length + kChunk - 1) / kChunk; }

/// A bf16 tile with rows of kCols elements (64 or 128). 16-byte pieces are swizzled so that 8 rows of one column meet
/// 8 groups of banks.
template <int kCols>
struct Tile {
  static constexpr int kCols_ = kCols, kRowBytes = 2 * kCols, kBytes = kChunk * kRowBytes;
  uint32_t base;
  __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t piece) const {
    return base + row * kRowBytes + ((piece ^ (row & 7)) << 4);
  }
};

// ---------------------------------------------------------------------------------------------------- instructions
__device__ __forceinline__ void copy_async(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 16 : 0;  // the rest is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// Arrives on an mbarrier when all that this thread has copied so far is there.
__device__ __forceinline__ void copy_arrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(ptx::smem_u32(bar)) : "memory");
}
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
/// Transposes the 8×8 matrix whose row r a lane holds columns 2q, 2q + 1 of.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

// --------------------------------------------------------------------------------------------------------- packing
__device__ __forceinline__ uint32_t pack(float low, float high) { return ptx::pack2<bf16>(low, high); }
__device__ __forceinline__ float low_of(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_of(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
/// Both halves times a factor each.
__device__ __forceinline__ uint32_t scaled(uint32_t x, float low, float high) {
  return pack(low_of(x) * low, high_of(x) * high);
}
__device__ __forceinline__ uint32_t negated(uint32_t x) { return x ^ 0x80008000u; }

// ----------------------------------------------------------------------------------------------------- tile access
/// kRows rows from global memory, by all kThreads of a block; rows from `valid` on are 0. Completes with copy_wait.
template <int kRows, int kThreads, int kCols>
__device__ __forceinline__ void load_tile(Tile<kCols> to, const bf16* from, int64_t stride, int valid) {
  constexpr int kPieces = kCols / 8;
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x, row = index / kPieces, piece = index % kPieces;
    copy_async(to.at(row, piece), from + (row < valid ? row * stride + piece * 8 : 0), row < valid);
  }
}

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

/// A = 16 rows from m of the tile, 16 columns from k.
template <int kCols>
__device__ __forceinline__ void a_rows(uint32_t (&a)[4], Tile<kCols> x, int m, int k) {
  load_matrices(a, x.at(m + lane_id() % 16, k / 8 + lane_id() / 16));
}
/// A = transpose of the tile's 16 rows from k, 16 columns from m.
template <int kCols>
__device__ __forceinline__ void a_columns(uint32_t (&a)[4], Tile<kCols> x, int k, int m) {
  load_matrices_transposed(a, x.at(k + lane_id() / 16 * 8 + lane_id() % 8, m / 8 + lane_id() / 8 % 2));
}
/// B of two n8 tiles (b[0], b[1] and b[2], b[3]): rows of the tile are columns of B.
template <int kCols>
__device__ __forceinline__ void b_rows(uint32_t (&b)[4], Tile<kCols> x, int n, int k) {
  load_matrices(b, x.at(n + lane_id() / 16 * 8 + lane_id() % 8, k / 8 + lane_id() / 8 % 2));
}
/// B of two n8 tiles: rows of the tile are rows of B.
template <int kCols>
__device__ __forceinline__ void b_columns(uint32_t (&b)[4], Tile<kCols> x, int k, int n) {
  load_matrices_transposed(b, x.at(k + lane_id() / 8 % 2 * 8 + lane_id() % 8, n / 8 + lane_id() / 16));
}

/// Two accumulators as an A operand.
__device__ __forceinline__ void pack_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack(left[0], left[1]), a[1] = pack(left[2], left[3]);
  a[2] = pack(right[0], right[1]), a[3] = pack(right[2], right[3]);
}

template <int kTiles>
__device__ __forceinline__ void clear(float (&d)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) d[i][e] = 0;
}

/// d += a · (16 rows from k of x, 8 kTiles columns from n).
template <int kTiles, int kCols>
__device__ __forceinline__ void mma_columns(float (&d)[kTiles][4], const uint32_t (&a)[4], Tile<kCols> x, int k,
                                            int n) {
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    uint32_t b[4];
    b_columns(b, x, k, n + 8 * i);
    mma(d[i], a, b[0], b[1]);
    mma(d[i + 1], a, b[2], b[3]);
  }
}
/// d += a · (8 kTiles rows from n of x, 16 columns from k)ᵀ.
template <int kTiles, int kCols>
__device__ __forceinline__ void mma_rows(float (&d)[kTiles][4], const uint32_t (&a)[4], Tile<kCols> x, int n, int k) {
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    uint32_t b[4];
    b_rows(b, x, n + 8 * i, k);
    mma(d[i], a, b[0], b[1]);
    mma(d[i + 1], a, b[2], b[3]);
  }
}

/// A warp's accumulators (rows m, columns n of the tile) rounded into shared memory.
template <int kTiles, int kCols>
__device__ __forceinline__ void put(Tile<kCols> x, int m, int n, const float (&d)[kTiles][4]) {
  const int r = lane_id() / 4, q = lane_id() % 4;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    store_shared(x.at(m + r, n / 8 + i) + 4 * q, pack(d[i][0], d[i][1]));
    store_shared(x.at(m + r + 8, n / 8 + i) + 4 * q, pack(d[i][2], d[i][3]));
  }
}
/// The same, on to global memory (16 bytes a lane): rows m ... m + 15 of the tile that are below `valid`, columns n ...
/// n + 8 kTiles - 1; `to` is the tile's row 0. The warp's own part of the tile is all that it touches.
template <int kTiles, int kCols>
__device__ __forceinline__ void put_through(Tile<kCols> x, int m, int n, const float (&d)[kTiles][4], bf16* to,
                                            int64_t stride, int valid) {
  put(x, m, n, d);
  __syncwarp();
#pragma unroll
  for (int i = lane_id(); i < 16 * kTiles; i += 32) {
    const int row = m + i / kTiles, piece = n / 8 + i % kTiles;
    if (row < valid) *reinterpret_cast<uint4*>(to + row * stride + piece * 8) = load_shared_16(x.at(row, piece));
  }
  __syncwarp();
}

/// An A operand into shared memory; the address is that of a_rows.
__device__ __forceinline__ void put_a(uint32_t address, const uint32_t (&a)[4]) {
  ptx::stmatrix_x4(address, a[0], a[1], a[2], a[3]);
}

/// Sum over the four lanes of an accumulator's row.
__device__ __forceinline__ float sum_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float sum_warp(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

}  // namespace fox::cuda
