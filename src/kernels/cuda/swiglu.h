#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// out (rows × width, contiguous) = silu(g) * y, with (g, y) the halves of gate_up (rows × 2 width, rows `stride`
/// elements apart). T: __nv_bfloat16, __half, float, double.
template <class T>
cudaError_t swiglu(const T* gate_up, int64_t stride, int64_t rows, int64_t width, T* out, cudaStream_t stream);

/// d_gate_up (rows × 2 width, contiguous) from dout (contiguous).
template <class T>
cudaError_t swiglu_backward(const T* dout, const T* gate_up, int64_t stride, int64_t rows, int64_t width, T* d_gate_up,
                            cudaStream_t stream);

}  // namespace fox::cuda
