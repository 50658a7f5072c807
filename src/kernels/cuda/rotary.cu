#include "kernels/cuda/rotary.h"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

template <class T, class A, int N>
__global__ void rotate(RotaryParams<T, A> p, T* y) {
  const int64_t half = p.dim / 2, row_items = half / N;
  const int64_t item = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (item >= p.batch * p.time * p.heads * row_items) return;
  const int64_t row = item / row_items, column = (item - row * row_items) * N;
  const int64_t h = row % p.heads, t = row / p.heads % p.time, b = row / p.heads / p.time;
  const T* x = p.x + b * p.x_batch + t * p.x_time + h * p.x_head + column;
  Vec<T, N> low, high;
  low.load(x);
  high.load(x + half);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const A c = p.cos[t * half + column + i],
            s = p.inverse ? -p.sin[t * half + column + i] : p.sin[t * half + column + i];
    const A a = low.v[i], b2 = high.v[i];
    low.v[i] = a * c - b2 * s;
    high.v[i] = a * s + b2 * c;
  }
  T* target = y + row * p.dim + column;
  low.store(target);
  high.store(target + half);
}

}  // namespace

template <class T, class A>
cudaError_t rotary(const RotaryParams<T, A>& p, T* y, cudaStream_t stream) {
  const int64_t n = p.batch * p.time * p.heads * (p.dim / 2);
  if (n == 0) return cudaSuccess;
  if (is_vectorizable<T>(p.x, p.x_batch, p.x_time, p.x_head, p.dim / 2) && is_vectorizable<T>(y)) {
    rotate<T, A, kVec<T>><<<grid_of(n / kVec<T>), kThreads, 0, stream>>>(p, y);
  } else {
    rotate<T, A, 1><<<grid_of(n), kThreads, 0, stream>>>(p, y);
  }
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T) \
  template cudaError_t rotary<T, Compute<T>>(const RotaryParams<T, Compute<T>>&, T*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
