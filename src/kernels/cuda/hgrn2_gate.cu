// HGRN2's gates, one pass over memory each way. A lane has a few neighbouring channels, a warp a run of rows of which
// it reads several at once. Backward, the sums for the lower bound of a block's warps meet in shared memory.
#include "kernels/cuda/hgrn2_gate.h"

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kAtOnce = 4, kRun = 8;  // rows of a warp: read at once, in all

/// The rows and channels of a lane. Blocks of the same rows are neighbours.
template <int N>
struct Place {
  int64_t first, channel;
  unsigned row;  // of blocks
  bool has_channel;

  __device__ explicit Place(int64_t channels) {
    const auto blocks = static_cast<unsigned>((channels + 32 * N - 1) / (32 * N));
    row = blockIdx.x / blocks;
    channel = ((blockIdx.x - row * blocks) * 32 + threadIdx.x) * static_cast<int64_t>(N);
    first = (row * static_cast<int64_t>(kWarps) + threadIdx.y) * kRun;
    has_channel = channel < channels;
  }
};

/// σ(z), and σ(-z) with all its digits.
template <class T, class A>
struct Open {
  A open, closed;
  __device__ explicit Open(A z) : open(sigmoid<T>(z)), closed(sigmoid<T>(-z)) {}
};

template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) forward(Hgrn2GateParams<T, A> p, A* log_g, T* k) {
  const Place<N> at(p.channels);
  if (!at.has_channel) return;
  Vec<A, N> lower = {};
  if (p.lower) lower.load(p.lower + at.channel);
  for (int64_t first = at.first; first < min(at.first + kRun, p.rows); first += kAtOnce) {
    Raw<T, N> logits[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < p.rows) logits[i].load(p.logits + (first + i) * p.stride + at.channel);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= p.rows) break;
      Vec<A, N> log;
      A key[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A z = logits[i][j];
        if (p.lower) {
          const Open<T, A> gate(z);
          key[j] = (1 - lower.v[j]) * gate.closed;
          log.v[j] = ::log(lower.v[j] + (1 - lower.v[j]) * gate.open);
        } else {
          key[j] = sigmoid<T>(-z);
          log.v[j] = min(z, A(0)) - log1p(exp(-abs(z)));  // neither overflows nor loses the digits of a gate close to 1
        }
      }
      log.store(log_g + (first + i) * p.channels + at.channel);
      Raw<T, N> packed;
      packed.pack(key);
      packed.store(k + (first + i) * p.channels + at.channel);
    }
  }
}

/// The sums of a block's warps, in their order, to its row of `partials`.
template <class A, int N>
__device__ void leave_sums(const Place<N>& at, int64_t channels, const A (&own)[N], A* partials) {
  __shared__ A all[kWarps][N][32];
#pragma unroll
  for (int j = 0; j < N; ++j) all[threadIdx.y][j][threadIdx.x] = own[j];
  __syncthreads();
  if (!at.has_channel || threadIdx.y >= N) return;
  A total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) total += all[warp][threadIdx.y][threadIdx.x];
  partials[at.row * channels + at.channel + threadIdx.y] = total;
}

template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads)
    backward(Hgrn2GateParams<T, A> p, const A* dlog_g, const T* dk, T* dlogits, A* partials) {
  static_assert(N <= kWarps);
  const Place<N> at(p.channels);
  A sums[N] = {};
  if (at.has_channel) {
    Vec<A, N> lower = {};
    if (p.lower) lower.load(p.lower + at.channel);
    for (int64_t first = at.first; first < min(at.first + kRun, p.rows); first += kAtOnce) {
      Raw<T, N> logits[kAtOnce] = {}, d_k[kAtOnce] = {};
      Vec<A, N> d_log[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= p.rows) break;
        const int64_t place = (first + i) * p.channels + at.channel;
        logits[i].load(p.logits + (first + i) * p.stride + at.channel);
        d_k[i].load(dk + place);
        d_log[i].load(dlog_g + place);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i >= p.rows) break;
        A dz[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const Open<T, A> gate(logits[i][j]);
          if (p.lower) {
            const A free = 1 - lower.v[j];
            const A dg = (d_log[i].v[j] / (lower.v[j] + free * gate.open) - d_k[i][j]) * gate.closed;
            sums[j] += dg;
            dz[j] = dg * free * gate.open;
          } else {
            dz[j] = (d_log[i].v[j] - d_k[i][j] * gate.open) * gate.closed;
          }
        }
        Raw<T, N> packed;
        packed.pack(dz);
        packed.store(dlogits + (first + i) * p.channels + at.channel);
      }
    }
  }
  ptx::start_next_kernel();
  if (p.lower) leave_sums(at, p.channels, sums, partials);
}

/// Calls f.operator()<channels a lane>(blocks): as many as one 16-byte access of A has, or one.
template <class T, class A, class F>
cudaError_t launch(const Hgrn2GateParams<T, A>& p, bool aligned, const F& f) {
  if (p.rows * p.channels == 0) return cudaSuccess;
  constexpr int kMany = kVec<A>;
  const auto with = [&]<int N>() {
    f.template operator()<N>(
        static_cast<unsigned>(hgrn2_gate_partials(p.rows) * ((p.channels + 32 * N - 1) / (32 * N))));
  };
  aligned&& is_aligned(p.logits, kMany, p.stride) && p.channels % kMany == 0 ? with.template operator()<kMany>()
                                                                             : with.template operator()<1>();
  return cudaGetLastError();
}

constexpr dim3 kBlock(32, kWarps);

}  // namespace

template <class T, class A>
cudaError_t hgrn2_gate(const Hgrn2GateParams<T, A>& p, A* log_g, T* k, cudaStream_t stream) {
  return launch(p, is_vectorizable<T>(k) && is_vectorizable<A>(log_g),
                [&]<int N>(unsigned blocks) { forward<T, A, N><<<blocks, kBlock, 0, stream>>>(p, log_g, k); });
}

int64_t hgrn2_gate_partials(int64_t rows) { return (rows + kWarps * kRun - 1) / (kWarps * kRun); }

template <class T, class A>
cudaError_t hgrn2_gate_backward(const Hgrn2GateParams<T, A>& p, const A* dlog_g, const T* dk, T* dlogits, A* partials,
                                cudaStream_t stream) {
  const bool aligned = is_vectorizable<A>(dlog_g) && is_vectorizable<T>(dk) && is_vectorizable<T>(dlogits);
  return launch(p, aligned, [&]<int N>(unsigned blocks) {
    backward<T, A, N><<<blocks, kBlock, 0, stream>>>(p, dlog_g, dk, dlogits, partials);
  });
}

#define FOX_INSTANTIATE(T)                                                                                          \
  template cudaError_t hgrn2_gate<T, Compute<T>>(const Hgrn2GateParams<T, Compute<T>>&, Compute<T>*, T*,            \
                                                 cudaStream_t);                                                     \
  template cudaError_t hgrn2_gate_backward<T, Compute<T>>(const Hgrn2GateParams<T, Compute<T>>&, const Compute<T>*, \
                                                          const T*, T*, Compute<T>*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
