#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

enum class Activation { kSigmoid, kSilu };

/// y = (x + branch) / rms(x + branch) * weight * activation(gate), the mean of squares over each group. TX: dtype of x
/// and of the sum; TY: that of everything else but the weight; A: what they are computed in, float, or double for
/// double. TX is TY (__nv_bfloat16, __half, float or double), or float beside a TY of 16 bits.
template <class TX, class TY, class A>
struct RmsNormParams {
  const TX* x;            ///< rows × (groups · width), each row contiguous
  int64_t x_stride;       ///< elements from row to row
  const A* weight;        ///< or nullptr for 1
  int64_t weight_stride;  ///< elements from group to group: width, or 0 where the groups share one weight
  int64_t rows, groups, width;
  A eps;
  const TY* branch = nullptr;  ///< rows × (groups · width), or nullptr for 0
  int64_t branch_stride = 0;
  const TY* gate = nullptr;  ///< rows × (groups · width), or nullptr for no activation
  int64_t gate_stride = 0;
  Activation activation = Activation::kSigmoid;
};

/// Whether these shapes, strides and addresses suit the kernels with a branch or a gate. Plain RMSNorm takes any.
template <class TX, class TY, class A>
bool rms_norm_is_fast(const RmsNormParams<TX, TY, A>& p);

/// y, and with a branch the sum x + branch, both contiguous.
template <class TX, class TY, class A>
cudaError_t rms_norm(const RmsNormParams<TX, TY, A>& p, TX* sum, TY* y, cudaStream_t stream);

/// What rms_norm_backward writes, all contiguous.
template <class TX, class TY, class A>
struct RmsNormGradients {
  TX* dx;
  TY* dbranch = nullptr;  ///< dx in the branch's dtype, or nullptr
  TY* dgate = nullptr;    ///< wanted with a gate
  /// rms_norm_backward_partials() × (weight's size), or nullptr: their sum over the rows is the weight's gradient.
  A* partial = nullptr;
};

/// Rows of `partial` that rms_norm_backward wants.
template <class TX, class TY, class A>
int64_t rms_norm_backward_partials(const RmsNormParams<TX, TY, A>& p);

/// From dy and dsum (contiguous; nullptr for 0), with p.x the sum that the forward pass left, and no branch. No
/// atomics: the same bits every time.
template <class TX, class TY, class A>
cudaError_t rms_norm_backward(const RmsNormParams<TX, TY, A>& p, const TY* dy, const TX* dsum,
                              const RmsNormGradients<TX, TY, A>& gradients, cudaStream_t stream);

}  // namespace fox::cuda
