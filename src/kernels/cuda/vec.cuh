#pragma once

// What the memory-bound kernels share: 16-byte accesses, arithmetic in float32 at least, sums over lanes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <type_traits>

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

/// The unsigned type of `bytes` bytes that one access moves.
template <int bytes>
using Word = std::conditional_t<
    bytes == 16, uint4,
    std::conditional_t<bytes == 8, uint2,
                       std::conditional_t<bytes == 4, uint32_t, std::conditional_t<bytes == 2, uint16_t, uint8_t>>>>;

/// Two neighbouring elements at once: one instruction rounds and packs two 16-bit ones.
template <class T>
__device__ __forceinline__ void pack_pair(T* t, Compute<T> a, Compute<T> b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    *reinterpret_cast<__nv_bfloat162*>(t) = __floats2bfloat162_rn(a, b);
  } else if constexpr (std::is_same_v<T, __half>) {
    *reinterpret_cast<__half2*>(t) = __floats2half2_rn(a, b);
  } else {
    t[0] = from_compute<T>(a), t[1] = from_compute<T>(b);
  }
}

/// N neighbouring elements as they lie in memory, moved by one access of up to 16 bytes. 16-bit ones take half the
/// registers that they take in float32, so more of them can be on their way.
template <class T, int N>
struct Raw {
  using W = Word<N* static_cast<int>(sizeof(T))>;
  W word;

  __device__ __forceinline__ void load(const T* p) { word = *reinterpret_cast<const W*>(p); }
  __device__ __forceinline__ void store(T* p) const { *reinterpret_cast<W*>(p) = word; }
  __device__ __forceinline__ Compute<T> operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N > 1) {  // the upper half of a float32: one instruction
      const uint32_t pair = reinterpret_cast<const uint32_t*>(&word)[i / 2];
      return __uint_as_float(i % 2 ? pair & 0xffff0000U : pair << 16);
    } else {
      return to_compute(reinterpret_cast<const T*>(&word)[i]);
    }
  }
  __device__ __forceinline__ void pack(const Compute<T>* v) {
    T* t = reinterpret_cast<T*>(&word);
    if constexpr (N == 1) {
      t[0] = from_compute<T>(v[0]);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) pack_pair(t + i, v[i], v[i + 1]);
    }
  }
};

/// N neighbouring elements in the compute type; 16-byte accesses where N allows them, 8-byte ones for half as many, or
/// element by element.
template <class T, int N>
struct Vec {
  static constexpr int kStep = N % kVec<T> == 0 ? kVec<T> : 2 * N == kVec<T> ? N : 1;  // elements of an access
  Compute<T> v[N];

  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int at = 0; at < N; at += kStep) {
      Raw<T, kStep> raw;
      raw.load(p + at);
#pragma unroll
      for (int i = 0; i < kStep; ++i) v[at + i] = raw[i];
    }
  }
  __device__ __forceinline__ void store(T* p) const {
#pragma unroll
    for (int at = 0; at < N; at += kStep) {
      Raw<T, kStep> raw;
      raw.pack(v + at);
      raw.store(p + at);
    }
  }
};

/// Sum over `lanes` neighbouring lanes (a power of two), in all of them.
template <class A>
__device__ __forceinline__ A sum_lanes(A x, int lanes) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < lanes) x += __shfl_xor_sync(0xffffffffu, x, mask);
  }
  return x;
}

/// Whether p and every stride (in elements) allow 16-byte accesses.
template <class T, class... Strides>
bool is_vectorizable(const void* p, Strides... strides) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && ((strides % kVec<T> == 0) && ...);
}

/// σ(x), for 16-bit T from the approximate instructions (a few units of float32's last place).
template <class T>
__device__ __forceinline__ Compute<T> sigmoid(Compute<T> x) {
  if constexpr (sizeof(T) == 2) {
    return __fdividef(1.0F, 1.0F + __expf(-x));
  } else {
    return 1 / (1 + exp(-x));
  }
}

/// Whether p and a stride (in elements) allow accesses of N elements of up to 16 bytes.
template <class T>
bool is_aligned(const T* p, int64_t elements, int64_t stride) {
  return reinterpret_cast<uintptr_t>(p) % (elements * sizeof(T)) == 0 && stride % elements == 0;
}

/// How many blocks of `kernel` the current device holds at once. Asked once for each argument: the answer costs as much
/// host time as a launch.
template <class Kernel>
int64_t resident_blocks(Kernel kernel, int threads, size_t shared = 0) {
  int device = 0;
  cudaGetDevice(&device);
  thread_local std::map<std::tuple<const void*, int, size_t, int>, int64_t> known;
  int64_t& blocks = known[{reinterpret_cast<const void*>(kernel), threads, shared, device}];
  if (blocks > 0) return blocks;
  int sms = 1, per_sm = 1;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared);
  return blocks = static_cast<int64_t>(sms) * std::max(per_sm, 1);
}

/// Threads a block and blocks a grid for `n` items of one thread each.
constexpr int kThreads = 256;
inline unsigned grid_of(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

/// Instantiates a launcher for the dtypes that operators have.
#define FOX_FOR_EACH_DTYPE(MACRO) MACRO(__nv_bfloat16) MACRO(__half) MACRO(float) MACRO(double)

}  // namespace fox::cuda
