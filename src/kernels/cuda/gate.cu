#include "kernels/cuda/gate.h"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

template <class T, class A>
__global__ void forward(const T* logits, const A* bias, A* log_f, int64_t n, int64_t heads) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i >= n) return;
  const A x = static_cast<A>(to_compute(logits[i])) + (bias ? bias[i % heads] : A(0));
  // min(x, 0) - log(1 + e^-|x|) neither overflows nor loses the digits of a gate close to 1.
  log_f[i] = min(x, A(0)) - log1p(exp(-abs(x)));
}

template <class A>
__global__ void backward(const A* dlog_f, const A* log_f, A* dlogits, int64_t n) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i < n) dlogits[i] = dlog_f[i] * -expm1(log_f[i]);
}

}  // namespace

template <class T, class A>
cudaError_t log_sigmoid_gate(const T* logits, const A* bias, A* log_f, int64_t rows, int64_t heads,
                             cudaStream_t stream) {
  const int64_t n = rows * heads;
  if (n == 0) return cudaSuccess;
  forward<<<grid_of(n), kThreads, 0, stream>>>(logits, bias, log_f, n, heads);
  return cudaGetLastError();
}

template <class A>
cudaError_t log_sigmoid_gate_backward(const A* dlog_f, const A* log_f, A* dlogits, int64_t n, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  backward<<<grid_of(n), kThreads, 0, stream>>>(dlog_f, log_f, dlogits, n);
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T)                                                                                         \
  template cudaError_t log_sigmoid_gate<T, Compute<T>>(const T*, const Compute<T>*, Compute<T>*, int64_t, int64_t, \
                                                       cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)
template cudaError_t log_sigmoid_gate_backward<float>(const float*, const float*, float*, int64_t, cudaStream_t);
template cudaError_t log_sigmoid_gate_backward<double>(const double*, const double*, double*, int64_t, cudaStream_t);

}  // namespace fox::cuda
