#include "kernels/cuda/short_conv.h"

#include <limits>

#include "ops/cuda_common.h"
#include "ops/recurrence.h"
#include "ops/short_conv.h"
#include "ops/short_conv_schema.h"

namespace fox::ops {
namespace {

static_assert(kCudaShortConvTaps == cuda::kShortConvTaps);

/// The tensors as the kernels read them.
struct ShortConvCall {
  at::Tensor x, weight, bias, before, reach;

  ShortConvCall(const at::Tensor& x_in, const at::Tensor& weight_in, const OptionalTensor& bias_in,
                const OptionalTensor& before_in, const OptionalTensor& cu_seqlens) {
    const auto type = compute_type(x_in.scalar_type());
    const bool fits = x_in.stride(2) == 1 && x_in.stride(1) <= std::numeric_limits<int>::max();
    x = fits ? x_in : x_in.contiguous();
    weight = packed(cast(weight_in, type).t());  // as models keep it
    if (bias_in) bias = packed(cast(*bias_in, type));
    if (before_in) before = packed(cast(*before_in, x.scalar_type()));
    if (cu_seqlens) reach = tokens_before(cu_seqlens->to(x.device()), x.size(1));
  }
  template <class T, class A>
  cuda::ShortConvParams<T, A> params() const {
    return {.x = data<T>(x),
            .x_batch = x.stride(0),
            .x_time = static_cast<int>(x.stride(1)),
            .weight = data<A>(weight),
            .bias = data<A>(bias),
            .before = data<T>(before),
            .reach = data<int64_t>(reach),
            .batch = x.size(0),
            .time = x.size(1),
            .channels = static_cast<int>(x.size(2)),
            .taps = static_cast<int>(weight.size(1))};
  }
};

at::Tensor forward_cuda(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& before, const OptionalTensor& cu_seqlens) {
  static const auto op = find_operator<ShortConvForward>("fox::short_conv");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, weight, bias, before, cu_seqlens);
  if (is_composed_short_conv(x, weight)) return short_conv_reference(x, weight, bias, before, cu_seqlens);
  const ShortConvCall call(x, weight, bias, before, cu_seqlens);
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    check_launch("short_conv", cuda::short_conv(call.params<T, A>(), mutable_data<T>(y), stream_of(x)));
  });
  return y;
}

ShortConvGradients backward_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                 const OptionalTensor& bias, const OptionalTensor& before,
                                 const OptionalTensor& cu_seqlens) {
  static const auto op = find_operator<ShortConvBackward>("fox::short_conv_backward");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [dx, dweight, dbias, dbefore] = checked_results(op, dy, x, weight, bias, before, cu_seqlens);
  const ShortConvCall call(x, weight, bias, before, cu_seqlens);
  const auto g = packed(cast(dy, x.scalar_type()));
  const int64_t taps = weight.size(0), channels = x.size(2), numbers = channels * taps;
  const at::Tensor before_gradient = before ? at::zeros_like(call.before) : at::Tensor();
  at::Tensor partials;
  dispatch_cuda(x.scalar_type(), [&, dx = dx]<class T, class A>() {
    const auto p = call.params<T, A>();
    partials = at::empty({cuda::short_conv_partials(p), numbers + channels}, call.weight.options());
    check_launch("short_conv_backward",
                 cuda::short_conv_backward(p, data<T>(g), mutable_data<T>(dx), mutable_data<T>(before_gradient),
                                           mutable_data<A>(partials), stream_of(x)));
  });
  const auto sums = sum_of_rows("short_conv_backward", partials);
  dweight = cast(sums.narrow(0, 0, numbers).view({channels, taps}).t(), weight.scalar_type());
  if (bias) dbias = cast(sums.narrow(0, numbers, channels), bias->scalar_type());
  if (before) dbefore = cast(before_gradient, before->scalar_type());
  return {dx, dweight, dbias, dbefore};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("short_conv", forward_cuda);
  m.impl("short_conv_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
