#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// What SwiGLU reads: gate and value, rows × width, rows so many elements apart. T: __nv_bfloat16, __half, float,
/// double.
template <class T>
struct SwigluParams {
  const T *gate, *value;
  int64_t gate_stride, value_stride;
  int64_t rows, width;
};

/// out (rows × width, contiguous) = silu(gate) * value.
template <class T>
cudaError_t swiglu(const SwigluParams<T>& p, T* out, cudaStream_t stream);

/// dgate and dvalue (rows `stride` elements apart) from dout (contiguous).
template <class T>
cudaError_t swiglu_backward(const SwigluParams<T>& p, const T* dout, T* dgate, T* dvalue, int64_t stride,
                            cudaStream_t stream);

}  // namespace fox::cuda
