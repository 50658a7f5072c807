// HGRN2's gates, one pass over memory each way.
#include "kernels/cuda/hgrn2_gate.h"

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row_sums.cuh"

namespace fox::cuda {
namespace {

/// σ(z), and σ(-z) with all its digits.
template <class T, class A>
struct Open {
  A open, closed;
  __device__ explicit Open(A z) : open(sigmoid<T>(z)), closed(sigmoid<T>(-z)) {}
};

template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) forward(Hgrn2GateParams<T, A> p, A* log_g, T* k) {
  const RowPlace<N> at(p.channels);
  if (!at.has_channel) return;
  Vec<A, N> lower = {};
  if (p.lower) lower.load(p.lower + at.channel);
  for (int64_t first = at.first; first < min(at.first + kRowsOfWarp, p.rows); first += kRowsAtOnce) {
    Raw<T, N> logits[kRowsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (first + i < p.rows) logits[i].load(p.logits + (first + i) * p.stride + at.channel);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
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

template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads)
    backward(Hgrn2GateParams<T, A> p, const A* dlog_g, const T* dk, T* dlogits, A* partials) {
  const RowPlace<N> at(p.channels);
  A sums[N] = {};
  if (at.has_channel) {
    Vec<A, N> lower = {};
    if (p.lower) lower.load(p.lower + at.channel);
    for (int64_t first = at.first; first < min(at.first + kRowsOfWarp, p.rows); first += kRowsAtOnce) {
      Raw<T, N> logits[kRowsAtOnce] = {}, d_k[kRowsAtOnce] = {};
      Vec<A, N> d_log[kRowsAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (first + i >= p.rows) break;
        const int64_t place = (first + i) * p.channels + at.channel;
        logits[i].load(p.logits + (first + i) * p.stride + at.channel);
        d_k[i].load(dk + place);
        d_log[i].load(dlog_g + place);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
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
  if (p.lower) leave_row_sums(at, p.channels, sums, partials);
}

}  // namespace

template <class T, class A>
cudaError_t hgrn2_gate(const Hgrn2GateParams<T, A>& p, A* log_g, T* k, cudaStream_t stream) {
  const bool aligned = is_vectorizable<T>(k) && is_vectorizable<A>(log_g);
  return launch_rows<A>(p.logits, p.stride, p.rows, p.channels, aligned, [&]<int N>(unsigned blocks, dim3 threads) {
    forward<T, A, N><<<blocks, threads, 0, stream>>>(p, log_g, k);
  });
}

int64_t hgrn2_gate_partials(int64_t rows) { return row_blocks(rows); }

template <class T, class A>
cudaError_t hgrn2_gate_backward(const Hgrn2GateParams<T, A>& p, const A* dlog_g, const T* dk, T* dlogits, A* partials,
                                cudaStream_t stream) {
  const bool aligned = is_vectorizable<A>(dlog_g) && is_vectorizable<T>(dk) && is_vectorizable<T>(dlogits);
  return launch_rows<A>(p.logits, p.stride, p.rows, p.channels, aligned, [&]<int N>(unsigned blocks, dim3 threads) {
    backward<T, A, N><<<blocks, threads, 0, stream>>>(p, dlog_g, dk, dlogits, partials);
  });
}

#define FOX_INSTANTIATE(T)                                                                                          \
  template cudaError_t hgrn2_gate<T, Compute<T>>(const Hgrn2GateParams<T, Compute<T>>&, Compute<T>*, T*,            \
                                                 cudaStream_t);                                                     \
  template cudaError_t hgrn2_gate_backward<T, Compute<T>>(const Hgrn2GateParams<T, Compute<T>>&, const Compute<T>*, \
                                                          const T*, T*, Compute<T>*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
