#pragma once

// What kernels share that pass over rows once and add up a gradient for each channel: a lane has a few neighbouring
// channels, a warp a run of rows of which it reads several at once, and the sums of a block's warps meet in shared
// memory.

#include "kernels/cuda/vec.cuh"

namespace fox::cuda {

constexpr int kRowWarps = kThreads / 32;
constexpr int kRowsAtOnce = 4, kRowsOfWarp = 8;

/// The rows and channels of a lane. Blocks of the same rows are neighbours.
template <int N>
struct RowPlace {
  int64_t first, channel;
  unsigned row;  // of blocks
  bool has_channel;

  __device__ explicit RowPlace(int64_t channels) {
    const auto blocks = static_cast<unsigned>((channels + 32 * N - 1) / (32 * N));
    row = blockIdx.x / blocks;
    channel = ((blockIdx.x - row * blocks) * 32 + threadIdx.x) * static_cast<int64_t>(N);
    first = (row * static_cast<int64_t>(kRowWarps) + threadIdx.y) * kRowsOfWarp;
    has_channel = channel < channels;
  }
};

/// Blocks that stand one below the other: rows of partial sums.
inline int64_t row_blocks(int64_t rows) { return (rows + kRowWarps * kRowsOfWarp - 1) / (kRowWarps * kRowsOfWarp); }

/// The sums of a block's warps, in their order, to its row of `partials`.
template <class A, int N>
__device__ void leave_row_sums(const RowPlace<N>& at, int64_t channels, const A (&own)[N], A* partials) {
  static_assert(N <= kRowWarps);
  __shared__ A all[kRowWarps][N][32];
#pragma unroll
  for (int j = 0; j < N; ++j) all[threadIdx.y][j][threadIdx.x] = own[j];
  __syncthreads();
  if (!at.has_channel || threadIdx.y >= N) return;
  A total = 0;
#pragma unroll
  for (int warp = 0; warp < kRowWarps; ++warp) total += all[warp][threadIdx.y][threadIdx.x];
  partials[at.row * channels + at.channel + threadIdx.y] = total;
}

/// Calls f.operator()<channels a lane>(blocks, threads): as many as one 16-byte access of A has, or one. `aligned`:
/// whether all but x, rows `stride` elements apart, begin at 16-byte boundaries.
template <class A, class T, class F>
cudaError_t launch_rows(const T* x, int64_t stride, int64_t rows, int64_t channels, bool aligned, const F& f) {
  if (rows * channels == 0) return cudaSuccess;
  constexpr int kMany = kVec<A>;
  const auto with = [&]<int N>() {
    f.template operator()<N>(static_cast<unsigned>(row_blocks(rows) * ((channels + 32 * N - 1) / (32 * N))),
                             dim3(32, kRowWarps));
  };
  aligned&& is_aligned(x, kMany, stride) && channels % kMany == 0 ? with.template operator()<kMany>()
                                                                  : with.template operator()<1>();
  return cudaGetLastError();
}

}  // namespace fox::cuda
