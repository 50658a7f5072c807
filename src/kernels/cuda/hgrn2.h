#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/head_tensor.h"

namespace fox::cuda {

/// HGRN2's gated linear attention, S_t = g_t * S_{t-1} + k_t v_tᵀ, o_t = S_tᵀ q_t / √D, in chunks of 64 tokens: bf16
/// operands, float32 sums and states. Keys and values have D = 64 or 128 channels a head.
/// Pointers with strides (batch, time, head): last dimension contiguous, start and strides multiples of 16 bytes. The
/// others: contiguous.
struct Hgrn2Params {
  HeadTensor<__nv_bfloat16> q, k, v;  ///< (B, T, H, D)
  HeadTensor<float> log_g;            ///< (B, T, H, D): ln g <= 0; -inf forgets
  const float* first;                 ///< (B, H, D, D), keys first; or nullptr for 0
  int64_t batch, length, heads, dim;
};

struct Hgrn2Gradients {
  const __nv_bfloat16* d_o;     ///< (B, T, H, D)
  const float* dlast;           ///< (B, H, D, D), or nullptr for 0
  __nv_bfloat16 *dq, *dk, *dv;  ///< (B, T, H, D)
  float* dlog_g;                ///< (B, T, H, D)
  float* dfirst;                ///< (B, H, D, D)
};

bool hgrn2_supported(int64_t key_dim, int64_t value_dim);
/// Bytes of scratch memory that either pass needs.
int64_t hgrn2_workspace(const Hgrn2Params& p);
cudaError_t hgrn2_forward(const Hgrn2Params& p, __nv_bfloat16* o, float* last, void* workspace, cudaStream_t stream);
/// Computes the states again.
cudaError_t hgrn2_backward(const Hgrn2Params& p, const Hgrn2Gradients& g, void* workspace, cudaStream_t stream);

}  // namespace fox::cuda
