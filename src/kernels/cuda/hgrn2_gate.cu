// HGRN2's gates, one pass over memory each way.
#include "kernels/cuda/hgrn2_gate.h"

#include "kernels/cuda/row_sums.cuh"

namespace fox::cuda {
namespace {

/// σ(z), and σ(-z) with all its digits.
template <class T, class A>
struct Open {
  A open, closed;
  __device__ explicit Open(A z) : open(sigmoid<T>(z)), closed(sigmoid<T>(-z)) {}
};

template <class T, class A>
struct Gates {
  bool has_lower;
  A* log_g;
  T* k;

  template <int N>
  __device__ __forceinline__ void operator()(const Raw<T, N>& logits, const Vec<A, N>& lower, int64_t place) const {
    Vec<A, N> log;
    A key[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A z = logits[j];
      if (has_lower) {
        const Open<T, A> gate(z);
        key[j] = (1 - lower.v[j]) * gate.closed;
        log.v[j] = ::log(lower.v[j] + (1 - lower.v[j]) * gate.open);
      } else {
        key[j] = sigmoid<T>(-z);
        log.v[j] = min(z, A(0)) - log1p(exp(-abs(z)));  // neither overflows nor loses the digits of a gate close to 1
      }
    }
    log.store(log_g + place);
    Raw<T, N> packed;
    packed.pack(key);
    packed.store(k + place);
  }
};

template <class T, class A>
struct GateGradients {
  bool has_lower;
  const A* dlog_g;
  const T* dk;
  T* dlogits;

  template <int N>
  struct Read {
    Vec<A, N> log;
    Raw<T, N> k;
  };
  template <int N>
  __device__ __forceinline__ Read<N> read(int64_t place) const {
    Read<N> d;
    d.k.load(dk + place);
    d.log.load(dlog_g + place);
    return d;
  }
  template <int N>
  __device__ __forceinline__ void operator()(const Raw<T, N>& logits, const Vec<A, N>& lower, const Read<N>& d,
                                             int64_t place, A (&dlower)[N]) const {
    A dz[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Open<T, A> gate(logits[j]);
      if (has_lower) {
        const A free = 1 - lower.v[j];
        const A dg = (d.log.v[j] / (lower.v[j] + free * gate.open) - d.k[j]) * gate.closed;
        dlower[j] += dg;
        dz[j] = dg * free * gate.open;
      } else {
        dz[j] = (d.log.v[j] - d.k[j] * gate.open) * gate.closed;
      }
    }
    Raw<T, N> packed;
    packed.pack(dz);
    packed.store(dlogits + place);
  }
};

}  // namespace

template <class T, class A>
cudaError_t hgrn2_gate(const LogitRows<T, A>& p, A* log_g, T* k, cudaStream_t stream) {
  const bool aligned = is_vectorizable<T>(k) && is_vectorizable<A>(log_g);
  return launch_pass(p, aligned, Gates<T, A>{p.per_channel != nullptr, log_g, k}, stream);
}

template <class T, class A>
cudaError_t hgrn2_gate_backward(const LogitRows<T, A>& p, const A* dlog_g, const T* dk, T* dlogits, A* partials,
                                cudaStream_t stream) {
  const bool aligned = is_vectorizable<A>(dlog_g) && is_vectorizable<T>(dk) && is_vectorizable<T>(dlogits);
  return launch_pass_back(p, aligned, GateGradients<T, A>{p.per_channel != nullptr, dlog_g, dk, dlogits}, partials,
                          stream);
}

#define FOX_INSTANTIATE(T)                                                                                        \
  template cudaError_t hgrn2_gate<T, Compute<T>>(const LogitRows<T, Compute<T>>&, Compute<T>*, T*, cudaStream_t); \
  template cudaError_t hgrn2_gate_backward<T, Compute<T>>(const LogitRows<T, Compute<T>>&, const Compute<T>*,     \
                                                          const T*, T*, Compute<T>*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
