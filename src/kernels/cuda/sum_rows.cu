#include "kernels/cuda/sum_rows.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

constexpr int kBlock = 1024, kWarps = kBlock / 32;

// Four threads side by side read 4 N neighbouring columns of one row, the next four those of the next row: there are a
// few hundred rows of partial sums, so each thread has few loads, all on their way at once. Then eight threads' rows
// meet in each warp, and the warps in shared memory.
template <class A, int N>
__global__ void __launch_bounds__(kBlock) sum_block(const A* x, int64_t rows, int64_t columns, A* sum) {
  constexpr int kColumns = 4 * N;
  __shared__ A parts[kColumns][kWarps + 1];
  const int64_t first = blockIdx.x * static_cast<int64_t>(kColumns), column = first + threadIdx.x % 4 * N;
  Vec<A, N> own = {};
  ptx::start_next_kernel();
  ptx::wait_for_previous_kernel();
  if (column < columns) {
#pragma unroll 8
    for (int64_t row = threadIdx.x / 4; row < rows; row += kBlock / 4) {
      Vec<A, N> next;
      next.load(x + row * columns + column);
#pragma unroll
      for (int i = 0; i < N; ++i) own.v[i] += next.v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) own.v[i] += __shfl_xor_sync(0xffffffffU, own.v[i], mask);
    if (threadIdx.x % 32 < 4) parts[threadIdx.x % 4 * N + i][threadIdx.x / 32] = own.v[i];
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp >= kColumns || first + warp >= columns) return;
  const A total = sum_lanes(parts[warp][threadIdx.x % 32], 32);
  if (threadIdx.x % 32 == 0) sum[first + warp] = total;
}

}  // namespace

template <class A>
cudaError_t sum_rows(const A* x, int64_t rows, int64_t columns, A* sum, cudaStream_t stream) {
  if (columns == 0) return cudaSuccess;
  const auto launch = [&]<int N>() {
    return launch_early(sum_block<A, N>, static_cast<unsigned>((columns + 4 * N - 1) / (4 * N)), kBlock, 0, stream, x,
                        rows, columns, sum);
  };
  return is_vectorizable<A>(x, columns) ? launch.template operator()<kVec<A>>() : launch.template operator()<1>();
}

template cudaError_t sum_rows<float>(const float*, int64_t, int64_t, float*, cudaStream_t);
template cudaError_t sum_rows<double>(const double*, int64_t, int64_t, double*, cudaStream_t);

}  // namespace fox::cuda
