#include <algorithm>

#include "kernels/cuda/rms_norm.h"
#include "kernels/cuda/vec.cuh"

// Fast path: one thread holds one 16-byte piece of a row in registers, a block strides over rows, and the next row is
// on its way while the sums of this one are made. A mean over the whole row takes one barrier (two buffers take turns);
// a mean over a group that is a power of two of lanes takes none. Any other shape: a warp for each (row, group).
namespace fox::cuda {
namespace {

constexpr int kMaxWarps = 32;

// Sums over the lanes of a group or, with group_lanes = 0, over the block.
template <class A, int kCount>
struct RowSum {
  A buffer[2][kCount][kMaxWarps];

  __device__ __forceinline__ void operator()(A (&values)[kCount], int group_lanes, int turn) {
    if (group_lanes) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) values[c] = sum_lanes(values[c], group_lanes);
      return;
    }
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      values[c] = sum_lanes(values[c], 32);
      if (threadIdx.x % 32 == 0) buffer[turn][c][warp] = values[c];
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      values[c] = 0;
      for (int w = 0; w < warps; ++w) values[c] += buffer[turn][c][w];
    }
  }
};

template <class T, class A>
__device__ __forceinline__ void load_weight(const RmsNormParams<T, A>& p, int64_t column, A (&w)[kVec<T>]) {
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) {
    w[i] = p.weight ? p.weight[column / p.width * p.weight_stride + (column + i) % p.width] : A(1);
  }
}

template <class T, class A>
__global__ void forward_rows(RmsNormParams<T, A> p, T* y, int group_lanes) {
  __shared__ RowSum<A, 1> row_sum;
  constexpr int N = kVec<T>;
  const int64_t columns = p.groups * p.width, column = threadIdx.x * N;
  const bool active = column < columns;
  A w[N];
  if (active) load_weight(p, column, w);
  Vec<T, N> x{}, next{};
  if (active && blockIdx.x < p.rows) next.load(p.x + blockIdx.x * p.x_stride + column);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    x = next;
    if (active && row + gridDim.x < p.rows) next.load(p.x + (row + gridDim.x) * p.x_stride + column);
    A sums[1] = {0};
#pragma unroll
    for (int i = 0; i < N; ++i) sums[0] += x.v[i] * x.v[i];
    row_sum(sums, group_lanes, turn);
    const A r = rsqrt(sums[0] / p.width + p.eps);
#pragma unroll
    for (int i = 0; i < N; ++i) x.v[i] *= r * w[i];
    if (active) x.store(y + row * columns + column);
  }
}

template <class T, class A>
__global__ void backward_rows(RmsNormParams<T, A> p, const T* dy, T* dx, A* partial, int group_lanes) {
  __shared__ RowSum<A, 2> row_sum;
  constexpr int N = kVec<T>;
  const int64_t columns = p.groups * p.width, column = threadIdx.x * N;
  const bool active = column < columns;
  A w[N], dw[N] = {};
  if (active) load_weight(p, column, w);
  Vec<T, N> x{}, g{}, next_x{}, next_g{};
  if (active && blockIdx.x < p.rows) {
    next_x.load(p.x + blockIdx.x * p.x_stride + column);
    next_g.load(dy + blockIdx.x * columns + column);
  }
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    x = next_x, g = next_g;
    if (active && row + gridDim.x < p.rows) {
      next_x.load(p.x + (row + gridDim.x) * p.x_stride + column);
      next_g.load(dy + (row + gridDim.x) * columns + column);
    }
    A sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      sums[0] += x.v[i] * x.v[i];
      if (active) sums[1] += x.v[i] * g.v[i] * w[i];
    }
    row_sum(sums, group_lanes, turn);
    const A r = rsqrt(sums[0] / p.width + p.eps), pull = sums[1] * r * r / p.width;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dw[i] += g.v[i] * x.v[i] * r;
      if (active) g.v[i] = r * (g.v[i] * w[i] - x.v[i] * pull);
    }
    if (active) g.store(dx + row * columns + column);
  }
  if (partial && active) {
#pragma unroll
    for (int i = 0; i < N; ++i) partial[blockIdx.x * columns + column + i] = dw[i];
  }
}

// --- any shape -------------------------------------------------------------------------------------------------------

template <class T, class A>
struct Group {
  int64_t row, group;
  const T* x;
  const A* weight;
  __device__ explicit Group(const RmsNormParams<T, A>& p) {
    const int64_t item = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
    row = item / p.groups, group = item % p.groups;
    x = p.x + row * p.x_stride + group * p.width;
    weight = p.weight ? p.weight + group * p.weight_stride : nullptr;
  }
};

template <class T, class A>
__device__ A inverse_rms(const RmsNormParams<T, A>& p, const T* x) {
  A sum = 0;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) sum += to_compute(x[i]) * to_compute(x[i]);
  return rsqrt(sum_lanes(sum, 32) / p.width + p.eps);
}

template <class T, class A>
__global__ void forward_groups(RmsNormParams<T, A> p, T* y) {
  const Group<T, A> at(p);
  if (at.row >= p.rows) return;
  const A r = inverse_rms(p, at.x);
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
    y[(at.row * p.groups + at.group) * p.width + i] =
        from_compute<T>(to_compute(at.x[i]) * r * (at.weight ? at.weight[i] : A(1)));
  }
}

template <class T, class A>
__global__ void backward_groups(RmsNormParams<T, A> p, const T* dy, T* dx) {
  const Group<T, A> at(p);
  if (at.row >= p.rows) return;
  const A r = inverse_rms(p, at.x);
  const int64_t base = (at.row * p.groups + at.group) * p.width;
  A dot = 0;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
    dot += to_compute(at.x[i]) * to_compute(dy[base + i]) * (at.weight ? at.weight[i] : A(1));
  }
  const A pull = sum_lanes(dot, 32) * r * r / p.width;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
    const A g = to_compute(dy[base + i]) * (at.weight ? at.weight[i] : A(1));
    dx[base + i] = from_compute<T>(r * (g - to_compute(at.x[i]) * pull));
  }
}

// A warp sums every kGeneralParts-th row of one group.
constexpr int64_t kGeneralParts = 256;

template <class T, class A>
__global__ void weight_gradient(RmsNormParams<T, A> p, const T* dy, A* partial) {
  const int64_t columns = p.groups * p.width;
  const int64_t warp = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / 32;
  const int64_t group = warp % p.groups, part = warp / p.groups, parts = kGeneralParts;
  if (part >= parts) return;
  for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) partial[part * columns + group * p.width + i] = 0;
  for (int64_t row = part; row < p.rows; row += parts) {
    const T* x = p.x + row * p.x_stride + group * p.width;
    const A r = inverse_rms(p, x);
    for (int64_t i = threadIdx.x % 32; i < p.width; i += 32) {
      partial[part * columns + group * p.width + i] +=
          to_compute(dy[row * columns + group * p.width + i]) * to_compute(x[i]) * r;
    }
  }
}

/// Lanes of a group on the fast path (0: the whole block makes the sum), or -1 where only the general path fits.
template <class T, class A>
int fast_group_lanes(const RmsNormParams<T, A>& p) {
  const int64_t lanes = p.width / kVec<T>, columns = p.groups * p.width;
  if (columns > 1024 * kVec<T> || !is_vectorizable<T>(p.x, p.x_stride, p.width)) return -1;
  if (p.groups == 1) return 0;
  return lanes <= 32 && (lanes & (lanes - 1)) == 0 ? static_cast<int>(lanes) : -1;
}

template <class T, class A>
int row_threads(const RmsNormParams<T, A>& p) {
  return static_cast<int>((p.groups * p.width / kVec<T> + 31) / 32 * 32);
}

/// Enough blocks to fill the machine with 2,048 threads an SM, no more: each keeps its weight in registers.
template <class T, class A>
int64_t row_blocks(const RmsNormParams<T, A>& p) {
  int device = 0, sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  return std::max<int64_t>(std::min<int64_t>(p.rows, sms * int64_t{2048 / row_threads(p)}), 1);
}

}  // namespace

template <class T, class A>
cudaError_t rms_norm(const RmsNormParams<T, A>& p, T* y, cudaStream_t stream) {
  if (p.rows * p.groups * p.width == 0) return cudaSuccess;
  if (const int lanes = fast_group_lanes(p); lanes >= 0 && is_vectorizable<T>(y)) {
    forward_rows<<<static_cast<unsigned>(row_blocks(p)), row_threads(p), 0, stream>>>(p, y, lanes);
  } else {
    forward_groups<<<grid_of(p.rows * p.groups * 32), kThreads, 0, stream>>>(p, y);
  }
  return cudaGetLastError();
}

template <class T, class A>
int64_t rms_norm_backward_partials(const RmsNormParams<T, A>& p) {
  return fast_group_lanes(p) >= 0 ? row_blocks(p) : kGeneralParts;
}

template <class T, class A>
cudaError_t rms_norm_backward(const RmsNormParams<T, A>& p, const T* dy, T* dx, A* partial, cudaStream_t stream) {
  if (p.rows * p.groups * p.width == 0) return cudaSuccess;
  if (const int lanes = fast_group_lanes(p); lanes >= 0) {
    backward_rows<<<static_cast<unsigned>(row_blocks(p)), row_threads(p), 0, stream>>>(p, dy, dx, partial, lanes);
    return cudaGetLastError();
  }
  backward_groups<<<grid_of(p.rows * p.groups * 32), kThreads, 0, stream>>>(p, dy, dx);
  if (partial) weight_gradient<<<grid_of(kGeneralParts * p.groups * 32), kThreads, 0, stream>>>(p, dy, partial);
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T)                                                                                 \
  template cudaError_t rms_norm<T, Compute<T>>(const RmsNormParams<T, Compute<T>>&, T*, cudaStream_t);     \
  template int64_t rms_norm_backward_partials<T, Compute<T>>(const RmsNormParams<T, Compute<T>>&);         \
  template cudaError_t rms_norm_backward<T, Compute<T>>(const RmsNormParams<T, Compute<T>>&, const T*, T*, \
                                                        Compute<T>*, cudaStream_t);
FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
