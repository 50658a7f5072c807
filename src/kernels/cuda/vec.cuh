#pragma once

// What the memory-bound kernels share: 16-byte accesses, arithmetic in float32 at least, sums over lanes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// The type a kernel computes in.
template <class T>
struct ComputeOf {
  using type = float;
};
template <>
struct ComputeOf<double> {
  using type = double;
};
template <class T>
using Compute = typename ComputeOf<T>::type;

template <class T>
__device__ __forceinline__ Compute<T> to_compute(T x) {
  return static_cast<Compute<T>>(x);
}
template <class T>
__device__ __forceinline__ T from_compute(Compute<T> x) {
  return static_cast<T>(x);
}

/// Elements of one 16-byte access.
template <class T>
constexpr int kVec = 16 / sizeof(T);

/// N neighbouring elements in the compute type; one 16-byte access when N = kVec<T>, element by element otherwise.
template <class T, int N>
struct Vec {
  Compute<T> v[N];

  __device__ __forceinline__ void load(const T* p) {
    if constexpr (N == kVec<T>) {
      const uint4 raw = *reinterpret_cast<const uint4*>(p);
      const T* t = reinterpret_cast<const T*>(&raw);
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = to_compute(t[i]);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] = to_compute(p[i]);
    }
  }
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (N == kVec<T>) {
      uint4 raw;
      T* t = reinterpret_cast<T*>(&raw);
#pragma unroll
      for (int i = 0; i < N; ++i) t[i] = from_compute<T>(v[i]);
      *reinterpret_cast<uint4*>(p) = raw;
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) p[i] = from_compute<T>(v[i]);
    }
  }
};

/// Sum over `lanes` neighbouring lanes (a power of two), in all of them.
template <class A>
__device__ __forceinline__ A sum_lanes(A x, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}

/// Whether p and every stride (in elements) allow 16-byte accesses.
template <class T, class... Strides>
bool is_vectorizable(const void* p, Strides... strides) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && ((strides % kVec<T> == 0) && ...);
}

/// Threads a block and blocks a grid for `n` items of one thread each.
constexpr int kThreads = 256;
inline unsigned grid_of(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

/// Instantiates a launcher for the dtypes that operators have.
#define FOX_FOR_EACH_DTYPE(MACRO) MACRO(__nv_bfloat16) MACRO(__half) MACRO(float) MACRO(double)

}  // namespace fox::cuda
