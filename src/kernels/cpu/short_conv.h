#pragma once

#include <cstdint>

namespace fox::kernels {

/// A causal depthwise convolution of a few taps over time, then SiLU (ops/short_conv.h).
template <class T>
struct ShortConvParams {
  const T* x;               ///< (batch, time, channels), channels contiguous
  int64_t x_batch, x_time;  ///< strides of x in elements
  const T* weight;          ///< taps × channels, contiguous: the current token's tap last
  const T* bias;            ///< channels, or nullptr
  const T* before;          ///< batch × (taps - 1) × channels, contiguous: the tokens before the first; nullptr for 0
  const int64_t* reach;     ///< batch × time: how many tokens before each are of its document; nullptr: all
  int64_t batch, time, channels, taps;
};

/// y (batch × time × channels, contiguous).
template <class T>
void short_conv(const ShortConvParams<T>& p, T* y);

/// All contiguous, in the shapes of what they are gradients of; nullptr: not wanted (bias, before).
template <class T>
struct ShortConvGradients {
  T *x, *weight, *bias, *before;
};

/// Gradients from dy (batch × time × channels, contiguous). The same bits on any number of threads.
template <class T>
void short_conv_backward(const ShortConvParams<T>& p, const T* dy, const ShortConvGradients<T>& gradients);

}  // namespace fox::kernels
