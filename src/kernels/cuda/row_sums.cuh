#pragma once

// What kernels share that pass over the rows of logits once, with one more number for each channel, and backward add up
// its gradient: a lane has a few neighbouring channels, a warp a run of rows of which it reads several at once, and the
// sums of a block's warps meet in shared memory.

#include "kernels/cuda/logit_rows.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {

constexpr int kRowWarps = kThreads / 32;
constexpr int kRowsAtOnce = 4, kRowsOfWarp = kLogitRowsASum / kRowWarps;

/// Blocks on a processor at once: how many registers a lane may have.
template <class T>
constexpr int kBackwardBlocks = sizeof(T) == 2   ? 4
                                : sizeof(T) == 4 ? 3
                                                 : 2;

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

/// pass(logits, own, place) for each row: its N logits, what the channels have of their own, and where the logits'
/// place is in a contiguous tensor.
template <int N, class T, class A, class Pass>
__global__ void __launch_bounds__(kThreads) pass_over_rows(LogitRows<T, A> p, Pass pass) {
  const RowPlace<N> at(p.channels);
  if (!at.has_channel) return;
  Vec<A, N> own = {};
  if (p.per_channel) own.load(p.per_channel + at.channel);
  for (int64_t first = at.first; first < min(at.first + kRowsOfWarp, p.rows); first += kRowsAtOnce) {
    Raw<T, N> logits[kRowsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (first + i < p.rows) logits[i].load(p.logits + (first + i) * p.stride + at.channel);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (first + i >= p.rows) break;
      pass(logits[i], own, (first + i) * p.channels + at.channel);
    }
  }
}

/// The same with what pass.read<N>(place) reads of each row, pass(logits, own, gradients, place, sums). The sums are
/// parts of the gradient of p.per_channel, for `partials` if there is any.
template <int N, class T, class A, class Pass>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks<T>)
    pass_back_over_rows(LogitRows<T, A> p, Pass pass, A* partials) {
  const RowPlace<N> at(p.channels);
  A sums[N] = {};
  if (at.has_channel) {
    Vec<A, N> own = {};
    if (p.per_channel) own.load(p.per_channel + at.channel);
    for (int64_t first = at.first; first < min(at.first + kRowsOfWarp, p.rows); first += kRowsAtOnce) {
      Raw<T, N> logits[kRowsAtOnce] = {};
      decltype(pass.template read<N>(0)) gradients[kRowsAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (first + i >= p.rows) break;
        logits[i].load(p.logits + (first + i) * p.stride + at.channel);
        gradients[i] = pass.template read<N>((first + i) * p.channels + at.channel);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (first + i >= p.rows) break;
        pass(logits[i], own, gradients[i], (first + i) * p.channels + at.channel, sums);
      }
    }
  }
  ptx::start_next_kernel();
  if (p.per_channel) leave_row_sums(at, p.channels, sums, partials);
}

/// Calls f.operator()<channels a lane>(blocks, threads): as many as one 16-byte access of A has, or one. `aligned`:
/// whether all but the logits begin at 16-byte boundaries.
template <class T, class A, class F>
cudaError_t launch_rows(const LogitRows<T, A>& p, bool aligned, const F& f) {
  if (p.rows * p.channels == 0) return cudaSuccess;
  constexpr int kMany = kVec<A>;
  const auto with = [&]<int N>() {
    f.template operator()<N>(static_cast<unsigned>(logit_row_partials(p.rows) * ((p.channels + 32 * N - 1) / (32 * N))),
                             dim3(32, kRowWarps));
  };
  aligned&& is_aligned(p.logits, kMany, p.stride) && p.channels % kMany == 0 ? with.template operator()<kMany>()
                                                                             : with.template operator()<1>();
  return cudaGetLastError();
}

template <class T, class A, class Pass>
cudaError_t launch_pass(const LogitRows<T, A>& p, bool aligned, const Pass& pass, cudaStream_t stream) {
  return launch_rows(p, aligned, [&]<int N>(unsigned blocks, dim3 threads) {
    pass_over_rows<N><<<blocks, threads, 0, stream>>>(p, pass);
  });
}

template <class T, class A, class Pass>
cudaError_t launch_pass_back(const LogitRows<T, A>& p, bool aligned, const Pass& pass, A* partials,
                             cudaStream_t stream) {
  return launch_rows(p, aligned, [&]<int N>(unsigned blocks, dim3 threads) {
    pass_back_over_rows<N><<<blocks, threads, 0, stream>>>(p, pass, partials);
  });
}

}  // namespace fox::cuda
