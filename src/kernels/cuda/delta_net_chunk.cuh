#pragma once

// What DeltaNet's kernels share: arguments, where a chunk's data are, and tiles that global memory holds as they lie in
// shared memory.

#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/delta_net.h"

namespace fox::cuda::delta_net {

struct Args {
  DeltaNetParams p;
  DeltaNetGradients g;
  bf16* o;
  float* last;
  // (B, H, chunks, 64, D), as tiles lie in shared memory, q over √D; inverse (B, H, chunks, 64, 64), or nullptr; states
  // (B, H, chunks, D, D), values first
  bf16 *w, *u, *k, *q, *dn, *inverse, *before, *behind;
  int64_t chunks;
};

/// The chunk that a block works on.
template <int kD>
struct Place {
  int b, h, valid;
  int64_t chunk, t0, index;  // index: of the chunk among all

  __device__ __forceinline__ Place(const Args& a, int64_t sequence, int64_t c) : chunk(c), t0(c * kChunk) {
    b = static_cast<int>(sequence / a.p.heads), h = static_cast<int>(sequence % a.p.heads);
    valid = static_cast<int>(min(int64_t(kChunk), a.p.length - t0));
    index = sequence * a.chunks + c;
  }
  __device__ __forceinline__ const bf16* at(const HeadTensor<bf16>& x) const {
    return x.data + b * x.batch + t0 * x.time + h * x.head;
  }
  __device__ __forceinline__ int64_t packed(const Args& a) const {
    return ((b * a.p.length + t0) * a.p.heads + h) * kD;
  }
  __device__ __forceinline__ int64_t tile() const { return index * kChunk * kD; }
  __device__ __forceinline__ int64_t state() const { return index * kD * kD; }
  __device__ __forceinline__ float beta(const Args& a, int row) const {
    return row < valid ? a.p.beta[(b * a.p.length + t0 + row) * a.p.heads + h] : 0.f;
  }
};

template <int kD>
constexpr float kScale = kD == 128 ? 0.08838834764831845f : 0.125f;

/// A tile to or from global memory as it lies in shared memory, swizzled: the scans fetch it by one bulk copy.
template <int kThreads, int kD>
__device__ __forceinline__ void load_image(Tile<kD> to, const bf16* from) {
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kD / 8; i += kThreads) copy_async(to.base + i * 16, from + i * 8, true);
}
template <int kThreads, int kD>
__device__ __forceinline__ void store_image(Tile<kD> x, bf16* to, float scale = 1) {
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kD / 8; i += kThreads) {
    const uint4 y = load_shared_16(x.base + i * 16);
    const auto times = [&](uint32_t two) { return scaled(two, scale, scale); };
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
