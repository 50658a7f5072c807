#pragma once

// Where a chunk of one head lies in tensors (B, T, H, D), for kernels that give a chunk to a thread block.

#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/head_tensor.h"

namespace fox::cuda {

struct ChunkPlace {
  int b, h;
  int64_t chunk, t0;
  int valid;  // tokens; the last chunk may have less than 64

  __device__ __forceinline__ ChunkPlace(int batch, int head, int64_t chunk_of_sequence, int64_t length)
      : b(batch), h(head), chunk(chunk_of_sequence), t0(chunk * kChunk) {
    valid = static_cast<int>(min(int64_t(kChunk), length - t0));
  }
  /// Of the head i after this one.
  __device__ __forceinline__ ChunkPlace head(int i) const {
    ChunkPlace place = *this;
    place.h += i;
    return place;
  }
  template <class T>
  __device__ __forceinline__ const T* at(const HeadTensor<T>& x) const {
    return x.data + b * x.batch + t0 * x.time + h * x.head;
  }
  /// The chunk's first number in a contiguous (B, T, H, D).
  template <class Params>
  __device__ __forceinline__ int64_t packed(const Params& p, int dim) const {
    return ((b * p.length + t0) * p.heads + h) * dim;
  }

  /// The chunk's rows into a tile, by all kThreads of a block, 0 behind the end. Completes with copy_wait.
  template <int kThreads, int kCols>
  __device__ __forceinline__ void load(Tile<kCols> to, const HeadTensor<bf16>& x) const {
    load_tile<kChunk, kThreads>(to, at(x), x.time, valid);
  }
  template <int kThreads, int kCols, class Params>
  __device__ __forceinline__ void load_packed(Tile<kCols> to, const bf16* x, const Params& p) const {
    load_tile<kChunk, kThreads>(to, x + packed(p, kCols), p.heads * kCols, valid);
  }
  /// A warp's accumulators to a contiguous tensor, through its own part of a tile (see put_through).
  template <int kTiles, int kCols, class Params>
  __device__ __forceinline__ void store_packed(bf16* to, Tile<kCols> through, int m, int n, const float (&d)[kTiles][4],
                                               const Params& p) const {
    put_through(through, m, n, d, to + packed(p, kCols), p.heads * kCols, valid);
  }
};

/// A state's kRows rows, which follow each other.
template <int kRows, int kThreads, int kCols>
__device__ __forceinline__ void load_rows(Tile<kCols> to, const bf16* from) {
  for (int i = threadIdx.x; i < kRows * kCols / 8; i += kThreads)
    copy_async(to.at(i / (kCols / 8), i % (kCols / 8)), from + i * 8, true);
}

}  // namespace fox::cuda
