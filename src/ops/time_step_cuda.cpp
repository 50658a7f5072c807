#include "kernels/cuda/time_step.h"

#include "kernels/cuda/sum_rows.h"
#include "ops/cuda_common.h"
#include "ops/time_step_schema.h"

namespace fox::ops {
namespace {

/// The tensors as the kernels read them.
struct TimeStepCall {
  Rows logits;
  at::Tensor bias;

  TimeStepCall(const at::Tensor& logits_in, const at::Tensor& bias_in)
      : logits(as_rows(logits_in)), bias(packed(cast(bias_in, compute_type(logits_in.scalar_type())))) {}
  template <class T, class A>
  cuda::TimeStepParams<T, A> params() const {
    return {.logits = data<T>(logits.tensor),
            .stride = logits.stride,
            .bias = data<A>(bias),
            .rows = logits.rows,
            .channels = logits.width};
  }
};

at::Tensor forward_cuda(const at::Tensor& logits, const at::Tensor& bias) {
  static const auto op = find_operator<TimeStepForward>("fox::time_step");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto dt = checked_results(op, logits, bias);
  const TimeStepCall call(logits, bias);
  dispatch_cuda(logits.scalar_type(), [&]<class T, class A>() {
    check_launch("time_step", cuda::time_step(call.params<T, A>(), mutable_data<A>(dt), stream_of(dt)));
  });
  return dt;
}

TimeStepGradients backward_cuda(const at::Tensor& ddt, const at::Tensor& logits, const at::Tensor& bias) {
  static const auto op = find_operator<TimeStepBackward>("fox::time_step_backward");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto [dlogits, dbias] = checked_results(op, ddt, logits, bias);
  const TimeStepCall call(logits, bias);
  const auto d = packed(cast(ddt, call.bias.scalar_type()));
  const auto partials = at::empty({cuda::time_step_partials(call.logits.rows), bias.size(0)}, call.bias.options());
  const auto sums = at::empty_like(call.bias);
  dispatch_cuda(logits.scalar_type(), [&, dlogits = dlogits]<class T, class A>() {
    const auto stream = stream_of(dlogits);
    check_launch("time_step_backward",
                 cuda::time_step_backward(call.params<T, A>(), data<A>(d), mutable_data<T>(dlogits),
                                          mutable_data<A>(partials), stream));
    check_launch("time_step_backward",
                 cuda::sum_rows(data<A>(partials), partials.size(0), partials.size(1), mutable_data<A>(sums), stream));
  });
  return {dlogits, cast(sums, bias.scalar_type())};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("time_step", forward_cuda);
  m.impl("time_step_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
