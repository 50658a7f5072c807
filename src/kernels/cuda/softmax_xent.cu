#include <cmath>

#include "kernels/cuda/softmax_xent.h"
#include "kernels/cuda/vec.cuh"

// One block a row: the row of a 50,304-word vocabulary (100 KB in bf16) is read once from memory for its maximum and
// sum together, and again, from the L2 cache, for its gradient.
namespace fox::cuda {
namespace {

constexpr int kRowThreads = 512;

// A running maximum and the sum of exp(x - maximum).
template <class A>
struct OnlineSum {
  A max = -INFINITY, sum = 0;

  __device__ __forceinline__ void merge(A other_max, A other_sum) {
    const A m = ::max(max, other_max);
    // exp(-inf - -inf) would be NaN where nothing was seen yet.
    sum = (max == m ? sum : sum * exp(max - m)) + (other_max == m ? other_sum : other_sum * exp(other_max - m));
    max = m;
  }
};

template <class A>
__device__ OnlineSum<A> reduce_block(OnlineSum<A> own) {
  __shared__ A maxima[kRowThreads / 32], sums[kRowThreads / 32];
  for (int mask = 16; mask > 0; mask /= 2) {
    const A m = __shfl_xor_sync(0xffffffffu, own.max, mask), s = __shfl_xor_sync(0xffffffffu, own.sum, mask);
    own.merge(m, s);
  }
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = own.max, sums[threadIdx.x / 32] = own.sum;
  __syncthreads();
  OnlineSum<A> all;
  for (int w = 0; w < kRowThreads / 32; ++w) all.merge(maxima[w], sums[w]);
  return all;
}

template <class T, class A, int N>
__global__ void __launch_bounds__(kRowThreads) row_loss(SoftmaxXentParams<T, A> p, A* loss) {
  const int64_t row = blockIdx.x, label = p.labels[row];
  T* logits = p.logits + row * p.logits_stride;
  const bool ignored = label == -100, valid = label >= 0 && label < p.vocab;
  if (ignored) {
    if (threadIdx.x == 0) loss[row] = 0;
    if (p.gradient) {
      for (int64_t i = threadIdx.x; i < p.vocab; i += kRowThreads) logits[i] = from_compute<T>(0);
    }
    return;
  }
  const A label_logit = valid ? to_compute(logits[label]) : A(NAN);
  OnlineSum<A> own;
  const int64_t whole = p.vocab / N * N;
  for (int64_t i = threadIdx.x * N; i < whole; i += kRowThreads * N) {
    Vec<T, N> x;
    x.load(logits + i);
    A m = x.v[0];
#pragma unroll
    for (int k = 1; k < N; ++k) m = max(m, x.v[k]);
    A s = 0;
#pragma unroll
    for (int k = 0; k < N; ++k) s += exp(x.v[k] - m);
    own.merge(m, s);
  }
  if (whole + threadIdx.x < p.vocab) own.merge(to_compute(logits[whole + threadIdx.x]), 1);
  const OnlineSum<A> all = reduce_block(own);  // its barrier also orders the reads above before the writes below
  if (threadIdx.x == 0) loss[row] = all.max + log(all.sum) - label_logit;
  if (!p.gradient) return;
  const A weight = valid ? p.weight[row] : A(NAN), scale = weight / all.sum;
  for (int64_t i = threadIdx.x * N; i < whole; i += kRowThreads * N) {
    Vec<T, N> x;
    x.load(logits + i);
#pragma unroll
    for (int k = 0; k < N; ++k) x.v[k] = exp(x.v[k] - all.max) * scale - (i + k == label ? weight : A(0));
    x.store(logits + i);
  }
  if (const int64_t i = whole + threadIdx.x; i < p.vocab) {
    logits[i] = from_compute<T>(exp(to_compute(logits[i]) - all.max) * scale - (i == label ? weight : A(0)));
  }
}

}  // namespace

template <class T, class A>
cudaError_t softmax_xent(const SoftmaxXentParams<T, A>& p, A* loss, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(p.rows);
  if (is_vectorizable<T>(p.logits, p.logits_stride)) {
    row_loss<T, A, kVec<T>><<<blocks, kRowThreads, 0, stream>>>(p, loss);
  } else {
    row_loss<T, A, 1><<<blocks, kRowThreads, 0, stream>>>(p, loss);
  }
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T) \
  template cudaError_t softmax_xent<T, Compute<T>>(const SoftmaxXentParams<T, Compute<T>>&, Compute<T>*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
