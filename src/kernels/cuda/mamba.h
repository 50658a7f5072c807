#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// Mamba's selective scan, h_t = exp(dt_t a) * h_{t-1} + dt_t x_t b_tᵀ, y_t = h_t c_t + d * x_t, with 16 states a
/// channel, in float32. Strides in elements; the last dimension is contiguous.
struct MambaParams {
  const __nv_bfloat16* x;  ///< (B, T, I)
  int64_t x_batch, x_time;
  const __nv_bfloat16 *b, *c;  ///< (B, T, 16)
  int64_t b_batch, b_time, c_batch, c_time;
  const float* dt;     ///< (B, T, I), contiguous
  const float *a, *d;  ///< (I, 16), (I,)
  const bool* starts;  ///< (T,): a document starts, what is before is forgotten; or nullptr
  const float* first;  ///< (B, I, 16)
  int64_t batch, length, channels;
};

constexpr int kMambaStates = 16;
constexpr int kMambaChannelBlock = 128;  // channels that one thread block adds up into one partial gradient of b and c
inline int64_t mamba_chunks(const MambaParams& p) { return (p.length + 63) / 64; }

struct MambaGradients {
  const __nv_bfloat16* dy;  ///< (B, T, I), contiguous
  const float* dlast;       ///< (B, I, 16)
  __nv_bfloat16* dx;        ///< (B, T, I)
  float* ddt;               ///< (B, T, I)
  float* dbc;               ///< (ceil(I / kMambaChannelBlock), B, T, 32): db and dc, to be summed over the first
  float *da, *dd;           ///< (B, chunks, I, 16), (B, chunks, I): to be summed over the first two
  float* dfirst;            ///< (B, I, 16)
};

bool mamba_supported(int64_t states);
/// Bytes of scratch memory that either pass needs.
int64_t mamba_workspace(const MambaParams& p);
cudaError_t mamba_forward(const MambaParams& p, __nv_bfloat16* y, float* last, void* workspace, cudaStream_t stream);
/// Computes the states again.
cudaError_t mamba_backward(const MambaParams& p, const MambaGradients& g, void* workspace, cudaStream_t stream);

}  // namespace fox::cuda
