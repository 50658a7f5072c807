#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// HGRN2's forget gates and keys from their logits (ops/hgrn2_gate.h). T: __nv_bfloat16, __half, float, double; A: what
/// T is computed in.
template <class T, class A>
struct Hgrn2GateParams {
  const T* logits;  ///< rows × channels, rows `stride` elements apart
  int64_t stride;
  const A* lower;  ///< channels, contiguous from a 16-byte boundary on; or nullptr for 0
  int64_t rows, channels;
};

/// log_g, k (rows × channels, contiguous).
template <class T, class A>
cudaError_t hgrn2_gate(const Hgrn2GateParams<T, A>& p, A* log_g, T* k, cudaStream_t stream);

/// Rows of `channels` that hgrn2_gate_backward leaves partial sums in.
int64_t hgrn2_gate_partials(int64_t rows);

/// From dlog_g and dk: dlogits, all contiguous; and, where there is a lower bound, of each row of `partials` a part of
/// its gradient: sum_rows makes it of them.
template <class T, class A>
cudaError_t hgrn2_gate_backward(const Hgrn2GateParams<T, A>& p, const A* dlog_g, const T* dk, T* dlogits, A* partials,
                                cudaStream_t stream);

}  // namespace fox::cuda
