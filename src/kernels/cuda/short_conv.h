#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// A causal depthwise convolution of a few taps over time, then SiLU (ops/short_conv.h). T: __nv_bfloat16, __half,
/// float, double; A: what T is computed in. All but x is contiguous from a 16-byte boundary on.
template <class T, class A>
struct ShortConvParams {
  const T* x;       ///< (batch, time, channels), channels contiguous
  int64_t x_batch;  ///< strides of x in elements
  int x_time;
  const A* weight;       ///< channels × taps: the current token's tap last
  const A* bias;         ///< channels, or nullptr
  const T* before;       ///< batch × (taps - 1) × channels: the tokens before the first; nullptr for 0
  const int64_t* reach;  ///< time (batch 1): how many tokens before each are of its document; nullptr: all
  int64_t batch, time;
  int channels, taps;  ///< taps: 1 to kShortConvTaps
};
constexpr int kShortConvTaps = 4;

/// y (batch × time × channels).
template <class T, class A>
cudaError_t short_conv(const ShortConvParams<T, A>& p, T* y, cudaStream_t stream);

/// Rows of channels × (taps + 1) that short_conv_backward leaves partial sums in.
template <class T, class A>
int64_t short_conv_partials(const ShortConvParams<T, A>& p);

/// From dy: dx and dbefore (or nullptr); and of each row of `partials` a part of the gradients of the taps (channels ×
/// taps) and, behind them, of the bias: sum_rows makes them of it.
template <class T, class A>
cudaError_t short_conv_backward(const ShortConvParams<T, A>& p, const T* dy, T* dx, T* dbefore, A* partials,
                                cudaStream_t stream);

}  // namespace fox::cuda
