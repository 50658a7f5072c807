#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// log_f[r, h] = log σ(logits[r, h] + bias[h]), everything contiguous, bias may be nullptr. T: dtype of the logits
/// (__nv_bfloat16, __half, float, double); A: float, or double for double.
template <class T, class A>
cudaError_t log_sigmoid_gate(const T* logits, const A* bias, A* log_f, int64_t rows, int64_t heads,
                             cudaStream_t stream);

/// dlogits = dlog_f (1 - f), contiguous. A: float or double.
template <class A>
cudaError_t log_sigmoid_gate_backward(const A* dlog_f, const A* log_f, A* dlogits, int64_t n, cudaStream_t stream);

}  // namespace fox::cuda
