#pragma once

#include <tuple>

#include "ops/common.h"

/// The types of fox::short_conv and fox::short_conv_backward, for the CPU and CUDA sides.
namespace fox::ops {

/// x, weight, bias, before, cu_seqlens.
using ShortConvForward = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                                    const OptionalTensor&);
/// dx, dweight, dbias, dbefore; undefined where the argument is missing.
using ShortConvGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
/// dy, then as Forward.
using ShortConvBackward = ShortConvGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                             const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);

/// The most taps that the CUDA side has kernels for; no published model has more.
constexpr int64_t kCudaShortConvTaps = 4;
/// Whether there are more: then the operator is short_conv_reference.
inline bool is_composed_short_conv(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() && weight.dim() == 2 && weight.size(0) > kCudaShortConvTaps;
}

}  // namespace fox::ops
