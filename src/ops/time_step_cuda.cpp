#include "kernels/cuda/time_step.h"

#include "ops/logit_rows_cuda.h"
#include "ops/time_step_schema.h"

namespace fox::ops {
namespace {

at::Tensor forward_cuda(const at::Tensor& logits, const at::Tensor& bias) {
  static const auto op = find_operator<TimeStepForward>("fox::time_step");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto dt = checked_results(op, logits, bias);
  const LogitRowsCall call(logits, bias);
  dispatch_cuda(logits.scalar_type(), [&]<class T, class A>() {
    check_launch("time_step", cuda::time_step(call.params<T, A>(), mutable_data<A>(dt), stream_of(dt)));
  });
  return dt;
}

TimeStepGradients backward_cuda(const at::Tensor& ddt, const at::Tensor& logits, const at::Tensor& bias) {
  static const auto op = find_operator<TimeStepBackward>("fox::time_step_backward");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto [dlogits, dbias] = checked_results(op, ddt, logits, bias);
  const LogitRowsCall call(logits, bias);
  const auto d = packed(cast(ddt, call.per_channel.scalar_type())), partials = call.partials();
  dispatch_cuda(logits.scalar_type(), [&, dlogits = dlogits]<class T, class A>() {
    check_launch("time_step_backward",
                 cuda::time_step_backward(call.params<T, A>(), data<A>(d), mutable_data<T>(dlogits),
                                          mutable_data<A>(partials), stream_of(dlogits)));
  });
  return {dlogits, cast(sum_of_rows("time_step_backward", partials), bias.scalar_type())};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("time_step", forward_cuda);
  m.impl("time_step_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
