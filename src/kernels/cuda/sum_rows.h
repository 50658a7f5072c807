#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// sum (columns,) of x (rows × columns, contiguous) over the rows, in an order that depends on the shape alone: how the
/// partial sums of a weight's gradient become the gradient. A: float or double.
template <class A>
cudaError_t sum_rows(const A* x, int64_t rows, int64_t columns, A* sum, cudaStream_t stream);

}  // namespace fox::cuda
