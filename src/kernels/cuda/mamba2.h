#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/head_tensor.h"

namespace fox::cuda {

/// Mamba-2's state space model, h_t = exp(l_t) h_{t-1} + dt_t x_t b_tᵀ, y_t = h_t c_t + d x_t, in chunks of 64 tokens:
/// bf16 operands, float32 sums and states. Heads have 64 channels; the state size is 64 or 128.
/// Start and strides of x, b, c are multiples of 16 bytes. The others: contiguous.
struct Mamba2Params {
  HeadTensor<__nv_bfloat16> x;     ///< (B, T, H, 64)
  HeadTensor<__nv_bfloat16> b, c;  ///< (B, T, H, N) with the same for all heads: a stride of 0
  const float* dt;                 ///< (B, T, H)
  const float* log_decay;          ///< (B, T, H): l <= 0; -inf forgets
  const float* d;                  ///< (H,)
  const float* first;              ///< (B, H, 64, N), or nullptr for 0
  int64_t batch, length, heads, state_size;
};

constexpr int kMamba2HeadDim = 64;
/// Heads that one thread block of the backward pass adds up into one partial gradient of b and c.
constexpr int kMamba2HeadGroup = 8;

struct Mamba2Gradients {
  const __nv_bfloat16* dy;  ///< (B, T, H, 64)
  const float* dlast;       ///< (B, H, 64, N), or nullptr for 0
  __nv_bfloat16* dx;        ///< (B, T, H, 64)
  float *ddt, *dlog_decay;  ///< (B, T, H): through the values written, and through the decay
  float *db, *dc;           ///< (ceil(H / kMamba2HeadGroup), B, T, N): to be summed over the first dimension
  float* dd;                ///< (B, chunks, H): to be summed over the first two
  float* dfirst;            ///< (B, H, 64, N)
};

/// Chunks of 64 tokens in a sequence.
inline int64_t mamba2_chunks(const Mamba2Params& p) { return (p.length + 63) / 64; }

bool mamba2_supported(int64_t head_dim, int64_t state_size);
/// Bytes of scratch memory that either pass needs.
int64_t mamba2_workspace(const Mamba2Params& p);
cudaError_t mamba2_forward(const Mamba2Params& p, __nv_bfloat16* y, float* last, void* workspace, cudaStream_t stream);
/// Computes the states again.
cudaError_t mamba2_backward(const Mamba2Params& p, const Mamba2Gradients& g, void* workspace, cudaStream_t stream);

}  // namespace fox::cuda
