#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/logit_rows.h"

namespace fox::cuda {

/// Time steps softplus(logits + bias) of Mamba and Mamba-2 (ops/time_step.h): dt (rows × channels, contiguous).
/// p.per_channel: the bias.
template <class T, class A>
cudaError_t time_step(const LogitRows<T, A>& p, A* dt, cudaStream_t stream);

/// From ddt: dlogits, both contiguous; and of each row of `partials` a part of the bias' gradient.
template <class T, class A>
cudaError_t time_step_backward(const LogitRows<T, A>& p, const A* ddt, T* dlogits, A* partials, cudaStream_t stream);

}  // namespace fox::cuda
