#include "kernels/cuda/token_shift.h"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

// One team of `lanes` neighbouring lanes a (b, t, h) row: neighbouring teams read neighbouring heads and times, so that
// x_{t-1} comes from the cache.
template <class T>
struct Row {
  int64_t row, b, t, h;
  __device__ Row(const TokenShiftParams<T>& p, int lanes) {
    row = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / lanes;
    h = row % p.heads, t = row / p.heads % p.time, b = row / p.heads / p.time;
  }
  __device__ bool exists(const TokenShiftParams<T>& p) const { return b < p.batch; }
};

// What stands before token t of row b: the token before, prev at the start of a chunk, or nothing (0).
template <class T>
__device__ __forceinline__ const T* before(const TokenShiftParams<T>& p, const Row<T>& at) {
  if (at.t == 0) return p.prev ? p.prev + (at.b * p.heads + at.h) * p.dim : nullptr;
  if (p.begins && p.begins[at.b * p.time + at.t]) return nullptr;
  return p.x + at.b * p.x_batch + (at.t - 1) * p.x_time + at.h * p.x_head;
}

template <class T, int N>
__global__ void forward(TokenShiftParams<T> p, T* y, int lanes) {
  const Row<T> at(p, lanes);
  if (!at.exists(p)) return;
  const T* x = p.x + at.b * p.x_batch + at.t * p.x_time + at.h * p.x_head;
  const T* last = before(p, at);
  const Compute<T> alpha = to_compute(p.alpha[at.row]);
  for (int64_t d = threadIdx.x % lanes * N; d < p.dim; d += lanes * N) {
    Vec<T, N> now, then;
    now.load(x + d);
    if (last) then.load(last + d);
#pragma unroll
    for (int i = 0; i < N; ++i) now.v[i] = (last ? alpha * then.v[i] : 0) + (1 - alpha) * now.v[i];
    now.store(y + at.row * p.dim + d);
  }
}

template <class T, int N>
__global__ void backward(TokenShiftParams<T> p, const T* dy, T* dx, T* dalpha, T* dprev, int lanes) {
  using A = Compute<T>;
  const Row<T> at(p, lanes);
  const bool exists = at.exists(p);
  A sum = 0;
  if (exists) {
    const T* x = p.x + at.b * p.x_batch + at.t * p.x_time + at.h * p.x_head;
    const T* last = before(p, at);
    const A alpha = to_compute(p.alpha[at.row]);
    // Token t is also what stands before t + 1, unless that begins a document.
    const bool passed_on = at.t + 1 < p.time && !(p.begins && p.begins[at.b * p.time + at.t + 1]);
    const A next_alpha = passed_on ? to_compute(p.alpha[at.row + p.heads]) : A(0);
    for (int64_t d = threadIdx.x % lanes * N; d < p.dim; d += lanes * N) {
      Vec<T, N> now, then, g, next;
      now.load(x + d);
      g.load(dy + at.row * p.dim + d);
      if (last) then.load(last + d);
      if (passed_on) next.load(dy + (at.row + p.heads) * p.dim + d);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        sum += g.v[i] * ((last ? then.v[i] : 0) - now.v[i]);
        now.v[i] = (1 - alpha) * g.v[i] + (passed_on ? next_alpha * next.v[i] : 0);
        g.v[i] *= alpha;
      }
      now.store(dx + at.row * p.dim + d);
      if (dprev && at.t == 0) g.store(dprev + (at.b * p.heads + at.h) * p.dim + d);
    }
  }
  sum = sum_lanes(sum, lanes);
  if (exists && threadIdx.x % lanes == 0) dalpha[at.row] = from_compute<T>(sum);
}

template <class T>
bool vectorizable(const TokenShiftParams<T>& p) {
  return is_vectorizable<T>(p.x, p.x_batch, p.x_time, p.x_head, p.dim) && is_vectorizable<T>(p.prev);
}

int lanes_for(int64_t items) {
  int lanes = 1;
  while (lanes < 32 && lanes < items) lanes *= 2;
  return lanes;
}

}  // namespace

template <class T>
cudaError_t token_shift(const TokenShiftParams<T>& p, T* y, cudaStream_t stream) {
  const int64_t rows = p.batch * p.time * p.heads;
  if (rows * p.dim == 0) return cudaSuccess;
  if (vectorizable(p) && is_vectorizable<T>(y)) {
    const int lanes = lanes_for(p.dim / kVec<T>);
    forward<T, kVec<T>><<<grid_of(rows * lanes), kThreads, 0, stream>>>(p, y, lanes);
  } else {
    const int lanes = lanes_for(p.dim);
    forward<T, 1><<<grid_of(rows * lanes), kThreads, 0, stream>>>(p, y, lanes);
  }
  return cudaGetLastError();
}

template <class T>
cudaError_t token_shift_backward(const TokenShiftParams<T>& p, const T* dy, T* dx, T* dalpha, T* dprev,
                                 cudaStream_t stream) {
  const int64_t rows = p.batch * p.time * p.heads;
  if (rows * p.dim == 0) return cudaSuccess;
  if (vectorizable(p) && is_vectorizable<T>(dy) && is_vectorizable<T>(dx) && is_vectorizable<T>(dprev)) {
    const int lanes = lanes_for(p.dim / kVec<T>);
    backward<T, kVec<T>><<<grid_of(rows * lanes), kThreads, 0, stream>>>(p, dy, dx, dalpha, dprev, lanes);
  } else {
    const int lanes = lanes_for(p.dim);
    backward<T, 1><<<grid_of(rows * lanes), kThreads, 0, stream>>>(p, dy, dx, dalpha, dprev, lanes);
  }
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T)                                                           \
  template cudaError_t token_shift<T>(const TokenShiftParams<T>&, T*, cudaStream_t); \
  template cudaError_t token_shift_backward<T>(const TokenShiftParams<T>&, const T*, T*, T*, T*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
