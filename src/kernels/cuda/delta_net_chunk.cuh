#pragma once

// What DeltaNet's kernels share: arguments, where a chunk's data are, and tiles that global memory holds as they lie in
// shared memory.

#include "kernels/cuda/chunk_place.cuh"
#include "kernels/cuda/delta_net.h"

namespace fox::cuda::delta_net {

struct Args {
  DeltaNetParams p;
  DeltaNetGradients g;
  bf16* o;
  float* last;
  // (B, H, chunks, 64, D), as tiles lie in shared memory, q over √D; inverse (B, H, chunks, 64, 64), or nullptr; states
  // (B, H, chunks, D, D), values first, as tiles lie
  bf16 *w, *u, *k, *q, *dn, *inverse, *before, *behind;
  bool* passes;  // (B, H, chunks): the state goes through the chunk, no document starts in it
  int64_t chunks;
};

/// Which tokens of a chunk start a document. The state before the chunk is that of the tokens before the first start.
struct Documents {
  uint64_t starts = 0;

  /// Whether token i sees the state before the chunk, and is seen in the state behind it.
  __device__ __forceinline__ bool enters(int i) const { return until(i) == 0; }
  __device__ __forceinline__ bool leaves(int i) const { return starts >> i >> 1 == 0; }
  /// Calls f with what tells whether token i sees token j <= i. Where no document starts the compiler knows that it
  /// does.
  template <class F>
  __device__ __forceinline__ void masked(F f) const {
    if (starts) {
      f([this](int i, int j) { return until(i) == until(j); });
    } else {
      f([](int, int) { return true; });
    }
  }
  /// Keeps rows `row` and row + 8 of accumulators, of tokens that enter or leave; the others become 0.
  template <int kTiles>
  __device__ __forceinline__ void keep_entering(float (&d)[kTiles][4], int row) const {
    if (starts) keep_rows(d, enters(row), enters(row + 8));
  }
  template <int kTiles>
  __device__ __forceinline__ void keep_leaving(float (&d)[kTiles][4], int row) const {
    if (starts) keep_rows(d, leaves(row), leaves(row + 8));
  }

 private:
  __device__ __forceinline__ uint64_t until(int i) const { return starts & ((2ull << i) - 1); }
  template <int kTiles>
  __device__ __forceinline__ static void keep_rows(float (&d)[kTiles][4], bool upper, bool lower) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][e] = (e < 2 ? upper : lower) ? d[i][e] : 0.f;
  }
};

/// The chunk that a block works on.
template <int kD>
struct Place : ChunkPlace {
  int64_t index;  // of the chunk among those of all heads

  __device__ __forceinline__ Place(const Args& a, int64_t sequence, int64_t c)
      : ChunkPlace(static_cast<int>(sequence / a.p.heads), static_cast<int>(sequence % a.p.heads), c, a.p.length),
        index(sequence * a.chunks + c) {}
  __device__ __forceinline__ int64_t tile() const { return index * kChunk * kD; }
  __device__ __forceinline__ int64_t state() const { return index * kD * kD; }
  __device__ __forceinline__ float beta(const Args& a, int row) const {
    return row < valid ? a.p.beta[packed(a.p, 1) + row * a.p.heads] : 0.f;
  }
  /// By a whole warp.
  __device__ __forceinline__ Documents documents(const Args& a) const {
    if (!a.p.starts) return {};
    const auto half = [&](int first) {
      const int row = first + lane_id();
      return uint64_t(__ballot_sync(0xffffffffu, row < valid && a.p.starts[t0 + row]));
    };
    return {half(0) | half(32) << 32};
  }
};

template <int kD>
constexpr float kScale = kD == 128 ? 0.08838834764831845f : 0.125f;

/// A tile to or from global memory as it lies in shared memory, swizzled: the scans fetch it by one bulk copy.
template <int kThreads, int kRows = kChunk, int kD>
__device__ __forceinline__ void load_image(Tile<kD> to, const bf16* from) {
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kD / 8; i += kThreads) copy_async(to.base + i * 16, from + i * 8, true);
}
/// `factor` of a row.
template <int kThreads, int kD, class Factor>
__device__ __forceinline__ void store_image(Tile<kD> x, bf16* to, Factor factor) {
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kD / 8; i += kThreads) {
    const uint4 y = load_shared_16(x.base + i * 16);
    const float by = factor(i / (kD / 8));
    const auto times = [&](uint32_t two) { return scaled(two, by, by); };
    reinterpret_cast<uint4*>(to)[i] = make_uint4(times(y.x), times(y.y), times(y.z), times(y.w));
  }
}

/// A warp's accumulators into an image, through its own part of tile x.
template <int kTiles, int kD>
__device__ __forceinline__ void put_image(Tile<kD> x, int m, int n, const float (&d)[kTiles][4], bf16* to) {
  put(x, m, n, d);
  __syncwarp();
#pragma unroll
  for (int i = lane_id(); i < 16 * kTiles; i += 32) {
    const uint32_t at = x.at(m + i / kTiles, n / 8 + i % kTiles);
    reinterpret_cast<uint4*>(to)[(at - x.base) / 16] = load_shared_16(at);
  }
}

}  // namespace fox::cuda::delta_net
