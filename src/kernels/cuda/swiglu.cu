#include "kernels/cuda/swiglu.h"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

template <class T, int N>
__global__ void forward(SwigluParams<T> p, T* out) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x, row_items = p.width / N;
  if (item >= p.rows * row_items) return;
  const int64_t row = item / row_items, column = (item - row * row_items) * N;
  Vec<T, N> g, y;
  g.load(p.gate + row * p.gate_stride + column);
  y.load(p.value + row * p.value_stride + column);
#pragma unroll
  for (int i = 0; i < N; ++i) y.v[i] *= g.v[i] / (1 + exp(-g.v[i]));
  y.store(out + row * p.width + column);
}

template <class T, int N>
__global__ void backward(SwigluParams<T> p, const T* dout, T* dgate, T* dvalue, int64_t stride) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x, row_items = p.width / N;
  if (item >= p.rows * row_items) return;
  const int64_t row = item / row_items, column = (item - row * row_items) * N;
  Vec<T, N> g, y, d;
  g.load(p.gate + row * p.gate_stride + column);
  y.load(p.value + row * p.value_stride + column);
  d.load(dout + row * p.width + column);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Compute<T> s = 1 / (1 + exp(-g.v[i])), silu = g.v[i] * s;
    g.v[i] = d.v[i] * y.v[i] * (s + silu * (1 - s));
    y.v[i] = d.v[i] * silu;
  }
  g.store(dgate + row * stride + column);
  y.store(dvalue + row * stride + column);
}

template <class T>
bool allows_vectors(const SwigluParams<T>& p) {
  return is_vectorizable<T>(p.gate, p.gate_stride, p.width) && is_vectorizable<T>(p.value, p.value_stride);
}

}  // namespace

template <class T>
cudaError_t swiglu(const SwigluParams<T>& p, T* out, cudaStream_t stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  if (allows_vectors(p) && is_vectorizable<T>(out)) {
    forward<T, kVec<T>><<<grid_of(p.rows * p.width / kVec<T>), kThreads, 0, stream>>>(p, out);
  } else {
    forward<T, 1><<<grid_of(p.rows * p.width), kThreads, 0, stream>>>(p, out);
  }
  return cudaGetLastError();
}

template <class T>
cudaError_t swiglu_backward(const SwigluParams<T>& p, const T* dout, T* dgate, T* dvalue, int64_t stride,
                            cudaStream_t stream) {
  if (p.rows * p.width == 0) return cudaSuccess;
  if (allows_vectors(p) && is_vectorizable<T>(dout) && is_vectorizable<T>(dgate, stride) &&
      is_vectorizable<T>(dvalue)) {
    backward<T, kVec<T>><<<grid_of(p.rows * p.width / kVec<T>), kThreads, 0, stream>>>(p, dout, dgate, dvalue, stride);
  } else {
    backward<T, 1><<<grid_of(p.rows * p.width), kThreads, 0, stream>>>(p, dout, dgate, dvalue, stride);
  }
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T)                                                  \
  template cudaError_t swiglu<T>(const SwigluParams<T>&, T*, cudaStream_t); \
  template cudaError_t swiglu_backward<T>(const SwigluParams<T>&, const T*, T*, T*, int64_t, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
