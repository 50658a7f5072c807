#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// What becomes of queries, keys or values between their projection and attention, each step where it is asked for:
/// token shift x_t ← α_t x_{t-1} + (1 - α_t) x_t, RMSNorm of each head, rotary embedding. T: __nv_bfloat16, __half,
/// float, double; A: float, or double for double.
template <class T, class A>
struct AttnInputParams {
  const T* x;                       ///< (B, T, H, D), D contiguous
  int64_t x_batch, x_time, x_head;  ///< its strides in elements
  int64_t batch, time, heads, dim;

  const T* shift = nullptr;  ///< (B, T, H), H contiguous: α, or its logits; nullptr for no shift
  int64_t shift_batch = 0, shift_time = 0;
  bool shift_is_logit = false;
  const T* prev = nullptr;       ///< (B, H, D), contiguous: what stands before t = 0, or nullptr for 0
  const bool* begins = nullptr;  ///< (B, T): a document begins at t > 0, so 0 stands before it; or nullptr

  const A* weight = nullptr;  ///< of the norm, or nullptr for no norm
  int64_t weight_stride = 0;  ///< elements from head to head: D, or 0 where the heads share one weight
  A eps = 0;

  const A *cos = nullptr, *sin = nullptr;  ///< (T, D/2), contiguous, D even; or nullptr for no rotation
  bool inverse = false;                    ///< rotate back
};

/// The largest dim that attn_input takes.
constexpr int64_t kAttnInputMaxDim = 1024;

/// y (B, T, H, D), contiguous.
template <class T, class A>
cudaError_t attn_input(const AttnInputParams<T, A>& p, T* y, cudaStream_t stream);

/// What attn_input_backward writes, all contiguous.
template <class T, class A>
struct AttnInputGradients {
  T* dx;                ///< (B, T, H, D)
  T* dshift = nullptr;  ///< (B, T, H); wanted with a shift
  T* dprev = nullptr;   ///< (B, H, D), or nullptr
  /// attn_input_backward_partials() × (weight's size), or nullptr: their sum over the rows is the weight's gradient.
  A* partial = nullptr;
};

/// Rows of `partial` that attn_input_backward wants.
template <class T, class A>
int64_t attn_input_backward_partials(const AttnInputParams<T, A>& p);

/// From dy (contiguous), where there is a shift or a norm: the gradient of a rotation alone is the rotation back.
/// No atomics: the same bits every time.
template <class T, class A>
cudaError_t attn_input_backward(const AttnInputParams<T, A>& p, const T* dy, const AttnInputGradients<T, A>& gradients,
                                cudaStream_t stream);

}  // namespace fox::cuda
