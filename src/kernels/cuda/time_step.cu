// Time steps, one pass over memory each way.
#include "kernels/cuda/time_step.h"

#include "kernels/cuda/row_sums.cuh"

namespace fox::cuda {
namespace {

template <class T, class A>
struct Steps {
  A* dt;

  template <int N>
  __device__ __forceinline__ void operator()(const Raw<T, N>& logits, const Vec<A, N>& bias, int64_t place) const {
    Vec<A, N> out;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A x = logits[j] + bias.v[j];
      out.v[j] = max(x, A(0)) + log1p(exp(-abs(x)));  // neither overflows nor loses the digits of a small step
    }
    out.store(dt + place);
  }
};

template <class T, class A>
struct StepGradients {
  const A* ddt;
  T* dlogits;

  template <int N>
  __device__ __forceinline__ Vec<A, N> read(int64_t place) const {
    Vec<A, N> d;
    d.load(ddt + place);
    return d;
  }
  template <int N>
  __device__ __forceinline__ void operator()(const Raw<T, N>& logits, const Vec<A, N>& bias, Vec<A, N>& d,
                                             int64_t place, A (&dbias)[N]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      d.v[j] *= sigmoid<T>(logits[j] + bias.v[j]);
      dbias[j] += d.v[j];
    }
    Raw<T, N> packed;
    packed.pack(d.v);
    packed.store(dlogits + place);
  }
};

}  // namespace

template <class T, class A>
cudaError_t time_step(const LogitRows<T, A>& p, A* dt, cudaStream_t stream) {
  return launch_pass(p, is_vectorizable<A>(dt), Steps<T, A>{dt}, stream);
}

template <class T, class A>
cudaError_t time_step_backward(const LogitRows<T, A>& p, const A* ddt, T* dlogits, A* partials, cudaStream_t stream) {
  const bool aligned = is_vectorizable<A>(ddt) && is_vectorizable<T>(dlogits);
  return launch_pass_back(p, aligned, StepGradients<T, A>{ddt, dlogits}, partials, stream);
}

#define FOX_INSTANTIATE(T)                                                                                       \
  template cudaError_t time_step<T, Compute<T>>(const LogitRows<T, Compute<T>>&, Compute<T>*, cudaStream_t);     \
  template cudaError_t time_step_backward<T, Compute<T>>(const LogitRows<T, Compute<T>>&, const Compute<T>*, T*, \
                                                         Compute<T>*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
