#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/logit_rows.h"

namespace fox::cuda {

/// HGRN2's forget gates and keys (ops/hgrn2_gate.h): log_g, k (rows × channels, contiguous).
/// p.per_channel: the lower bound, nullptr for 0.
template <class T, class A>
cudaError_t hgrn2_gate(const LogitRows<T, A>& p, A* log_g, T* k, cudaStream_t stream);

/// From dlog_g and dk: dlogits, all contiguous; and, where there is a lower bound, of each row of `partials` a part of
/// its gradient.
template <class T, class A>
cudaError_t hgrn2_gate_backward(const LogitRows<T, A>& p, const A* dlog_g, const T* dk, T* dlogits, A* partials,
                                cudaStream_t stream);

}  // namespace fox::cuda
