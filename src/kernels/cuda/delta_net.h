#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/head_tensor.h"

namespace fox::cuda {

/// The delta rule, S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ, o_t = S_tᵀ q_t / √D, in chunks of 64 tokens: bf16
/// operands, float32 sums and states. Keys and values have D = 64 or 128 channels a head.
/// Start and strides of q, k, v are multiples of 16 bytes. The others: contiguous.
struct DeltaNetParams {
  HeadTensor<__nv_bfloat16> q, k, v;  ///< (B, T, H, D)
  const float* beta;                  ///< (B, T, H)
  const bool* starts;                 ///< (T,): a document starts, what is before is forgotten; or nullptr
  const float* first;                 ///< (B, H, D, D), keys first; or nullptr for 0
  int64_t batch, length, heads, dim;
};

struct DeltaNetGradients {
  const __nv_bfloat16* d_o;     ///< (B, T, H, D)
  const float* dlast;           ///< (B, H, D, D), or nullptr for 0
  __nv_bfloat16 *dq, *dk, *dv;  ///< (B, T, H, D)
  float* dbeta;                 ///< (B, T, H)
  float* dfirst;                ///< (B, H, D, D)
};

/// Whether the current device and these sizes have kernels: Hopper, heads of 64 or 128.
bool delta_net_supported(int64_t key_dim, int64_t value_dim);
/// Bytes of scratch memory of the passes.
int64_t delta_net_workspace(const DeltaNetParams& p, bool backward);
cudaError_t delta_net_forward(const DeltaNetParams& p, __nv_bfloat16* o, float* last, void* workspace,
                              cudaStream_t stream);
/// Computes the states again.
cudaError_t delta_net_backward(const DeltaNetParams& p, const DeltaNetGradients& g, void* workspace,
                               cudaStream_t stream);

}  // namespace fox::cuda
