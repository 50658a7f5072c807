#include "kernels/cuda/sum_rows.h"

namespace fox::cuda {
namespace {

constexpr int kColumns = 32, kParts = 32;

// A warp reads 32 neighbouring columns of every 32nd row; the 32 warps' sums meet in shared memory.
template <class A>
__global__ void sum_block(const A* x, int64_t rows, int64_t columns, A* sum) {
  __shared__ A parts[kParts][kColumns];
  const int64_t column = blockIdx.x * static_cast<int64_t>(kColumns) + threadIdx.x;
  A own = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < rows; row += kParts) own += x[row * columns + column];
  }
  parts[threadIdx.y][threadIdx.x] = own;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int part = 1; part < kParts; ++part) own += parts[part][threadIdx.x];
  sum[column] = own;
}

}  // namespace

template <class A>
cudaError_t sum_rows(const A* x, int64_t rows, int64_t columns, A* sum, cudaStream_t stream) {
  if (columns == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((columns + kColumns - 1) / kColumns);
  sum_block<<<blocks, dim3(kColumns, kParts), 0, stream>>>(x, rows, columns, sum);
  return cudaGetLastError();
}

template cudaError_t sum_rows<float>(const float*, int64_t, int64_t, float*, cudaStream_t);
template cudaError_t sum_rows<double>(const double*, int64_t, int64_t, double*, cudaStream_t);

}  // namespace fox::cuda
