// Time steps, one pass over memory each way.
#include "kernels/cuda/time_step.h"

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row_sums.cuh"

namespace fox::cuda {
namespace {

template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) forward(TimeStepParams<T, A> p, A* dt) {
  const RowPlace<N> at(p.channels);
  if (!at.has_channel) return;
  Vec<A, N> bias;
  bias.load(p.bias + at.channel);
  for (int64_t first = at.first; first < min(at.first + kRowsOfWarp, p.rows); first += kRowsAtOnce) {
    Raw<T, N> logits[kRowsAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (first + i < p.rows) logits[i].load(p.logits + (first + i) * p.stride + at.channel);
    }
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (first + i >= p.rows) break;
      Vec<A, N> out;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A x = logits[i][j] + bias.v[j];
        out.v[j] = max(x, A(0)) + log1p(exp(-abs(x)));  // neither overflows nor loses the digits of a small step
      }
      out.store(dt + (first + i) * p.channels + at.channel);
    }
  }
}

template <class T, class A, int N>
__global__ void __launch_bounds__(kThreads) backward(TimeStepParams<T, A> p, const A* ddt, T* dlogits, A* partials) {
  const RowPlace<N> at(p.channels);
  A sums[N] = {};
  if (at.has_channel) {
    Vec<A, N> bias;
    bias.load(p.bias + at.channel);
    for (int64_t first = at.first; first < min(at.first + kRowsOfWarp, p.rows); first += kRowsAtOnce) {
      Raw<T, N> logits[kRowsAtOnce] = {};
      Vec<A, N> d[kRowsAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (first + i >= p.rows) break;
        logits[i].load(p.logits + (first + i) * p.stride + at.channel);
        d[i].load(ddt + (first + i) * p.channels + at.channel);
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (first + i >= p.rows) break;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          d[i].v[j] *= sigmoid<T>(logits[i][j] + bias.v[j]);
          sums[j] += d[i].v[j];
        }
        Raw<T, N> packed;
        packed.pack(d[i].v);
        packed.store(dlogits + (first + i) * p.channels + at.channel);
      }
    }
  }
  ptx::start_next_kernel();
  leave_row_sums(at, p.channels, sums, partials);
}

}  // namespace

template <class T, class A>
cudaError_t time_step(const TimeStepParams<T, A>& p, A* dt, cudaStream_t stream) {
  return launch_rows<A>(
      p.logits, p.stride, p.rows, p.channels, is_vectorizable<A>(dt),
      [&]<int N>(unsigned blocks, dim3 threads) { forward<T, A, N><<<blocks, threads, 0, stream>>>(p, dt); });
}

int64_t time_step_partials(int64_t rows) { return row_blocks(rows); }

template <class T, class A>
cudaError_t time_step_backward(const TimeStepParams<T, A>& p, const A* ddt, T* dlogits, A* partials,
                               cudaStream_t stream) {
  const bool aligned = is_vectorizable<A>(ddt) && is_vectorizable<T>(dlogits);
  return launch_rows<A>(p.logits, p.stride, p.rows, p.channels, aligned, [&]<int N>(unsigned blocks, dim3 threads) {
    backward<T, A, N><<<blocks, threads, 0, stream>>>(p, ddt, dlogits, partials);
  });
}

#define FOX_INSTANTIATE(T)                                                                                            \
  template cudaError_t time_step<T, Compute<T>>(const TimeStepParams<T, Compute<T>>&, Compute<T>*, cudaStream_t);     \
  template cudaError_t time_step_backward<T, Compute<T>>(const TimeStepParams<T, Compute<T>>&, const Compute<T>*, T*, \
                                                         Compute<T>*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
