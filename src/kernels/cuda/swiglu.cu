#include "kernels/cuda/swiglu.h"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

template <class T, int N>
__global__ void forward(const T* gate_up, int64_t stride, int64_t items, int64_t row_items, int64_t width, T* out) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (item >= items) return;
  const int64_t row = item / row_items, column = (item - row * row_items) * N;
  Vec<T, N> g, y;
  g.load(gate_up + row * stride + column);
  y.load(gate_up + row * stride + width + column);
#pragma unroll
  for (int i = 0; i < N; ++i) y.v[i] *= g.v[i] / (1 + exp(-g.v[i]));
  y.store(out + row * width + column);
}

template <class T, int N>
__global__ void backward(const T* dout, const T* gate_up, int64_t stride, int64_t items, int64_t row_items,
                         int64_t width, T* d_gate_up) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (item >= items) return;
  const int64_t row = item / row_items, column = (item - row * row_items) * N;
  Vec<T, N> g, y, d;
  g.load(gate_up + row * stride + column);
  y.load(gate_up + row * stride + width + column);
  d.load(dout + row * width + column);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Compute<T> s = 1 / (1 + exp(-g.v[i])), silu = g.v[i] * s;
    g.v[i] = d.v[i] * y.v[i] * (s + silu * (1 - s));
    y.v[i] = d.v[i] * silu;
  }
  T* target = d_gate_up + row * 2 * width + column;
  g.store(target);
  y.store(target + width);
}

}  // namespace

template <class T>
cudaError_t swiglu(const T* gate_up, int64_t stride, int64_t rows, int64_t width, T* out, cudaStream_t stream) {
  if (rows * width == 0) return cudaSuccess;
  if (is_vectorizable<T>(gate_up, stride, width) && is_vectorizable<T>(out)) {
    const int64_t row_items = width / kVec<T>, items = rows * row_items;
    forward<T, kVec<T>><<<grid_of(items), kThreads, 0, stream>>>(gate_up, stride, items, row_items, width, out);
  } else {
    forward<T, 1><<<grid_of(rows * width), kThreads, 0, stream>>>(gate_up, stride, rows * width, width, width, out);
  }
  return cudaGetLastError();
}

template <class T>
cudaError_t swiglu_backward(const T* dout, const T* gate_up, int64_t stride, int64_t rows, int64_t width, T* d_gate_up,
                            cudaStream_t stream) {
  if (rows * width == 0) return cudaSuccess;
  if (is_vectorizable<T>(gate_up, stride, width) && is_vectorizable<T>(dout) && is_vectorizable<T>(d_gate_up)) {
    const int64_t row_items = width / kVec<T>, items = rows * row_items;
    backward<T, kVec<T>>
        <<<grid_of(items), kThreads, 0, stream>>>(dout, gate_up, stride, items, row_items, width, d_gate_up);
  } else {
    backward<T, 1>
        <<<grid_of(rows * width), kThreads, 0, stream>>>(dout, gate_up, stride, rows * width, width, width, d_gate_up);
  }
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T)                                                               \
  template cudaError_t swiglu<T>(const T*, int64_t, int64_t, int64_t, T*, cudaStream_t); \
  template cudaError_t swiglu_backward<T>(const T*, const T*, int64_t, int64_t, int64_t, T*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
