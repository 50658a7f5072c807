#include "ops/time_step.h"

#include "base/error.h"
#include "kernels/cpu/time_step.h"
#include "ops/common.h"
#include "ops/time_step_schema.h"

namespace fox::ops {
namespace {

void check_time_step(const at::Tensor& logits, const at::Tensor& bias) {
  constexpr const char* kOp = "time_step";
  check_floating(kOp, "logits", logits);
  if (logits.dim() < 1) throw Error("time_step: logits is a number", "its last dimension holds the channels");
  check_floating(kOp, "bias", bias);
  check_shape(kOp, "bias", bias, {logits.size(-1)}, "(C,)");
  check_device(kOp, "bias", bias, "logits", logits);
}

at::Tensor time_step_forward_meta(const at::Tensor& logits, const at::Tensor& bias) {
  check_time_step(logits, bias);
  return at::empty(logits.sizes(), logits.options().dtype(compute_type(logits.scalar_type())));
}

/// The tensors in the dtype and layout that the kernel reads; it must outlive the kernel's parameters.
struct TimeStepInputs {
  Rows logits;
  at::Tensor bias;

  TimeStepInputs(const at::Tensor& logits_in, const at::Tensor& bias_in)
      : logits(as_rows(cast(logits_in, compute_type(logits_in.scalar_type())))),
        bias(cast(bias_in, logits.tensor.scalar_type()).contiguous()) {}
  template <class T>
  kernels::TimeStepParams<T> params() const {
    return {.logits = logits.tensor.const_data_ptr<T>(),
            .stride = logits.stride,
            .bias = bias.const_data_ptr<T>(),
            .rows = logits.rows,
            .channels = logits.width};
  }
};

at::Tensor time_step_forward_cpu(const at::Tensor& logits, const at::Tensor& bias) {
  check_time_step(logits, bias);
  const TimeStepInputs in(logits, bias);
  auto dt = at::empty(logits.sizes(), in.bias.options());
  dispatch_real(dt.scalar_type(), [&]<class T>() { kernels::time_step(in.params<T>(), dt.mutable_data_ptr<T>()); });
  return dt;
}

TimeStepGradients time_step_backward_meta(const at::Tensor& ddt, const at::Tensor& logits, const at::Tensor& bias) {
  check_time_step(logits, bias);
  check_shape("time_step_backward", "ddt", ddt, logits.sizes(), "that of logits");
  return {at::empty(logits.sizes(), logits.options()), at::empty(bias.sizes(), bias.options())};
}

TimeStepGradients time_step_backward_cpu(const at::Tensor& ddt, const at::Tensor& logits, const at::Tensor& bias) {
  check_time_step(logits, bias);
  check_shape("time_step_backward", "ddt", ddt, logits.sizes(), "that of logits");
  const TimeStepInputs in(logits, bias);
  const auto d = cast(ddt, in.bias.scalar_type()).contiguous();
  const auto dlogits = at::empty(logits.sizes(), d.options()), dbias = at::empty(bias.sizes(), d.options());
  dispatch_real(d.scalar_type(), [&]<class T>() {
    kernels::time_step_backward(in.params<T>(), d.const_data_ptr<T>(), dlogits.mutable_data_ptr<T>(),
                                dbias.mutable_data_ptr<T>());
  });
  return {cast(dlogits, logits.scalar_type()), cast(dbias, bias.scalar_type())};
}

class TimeStep : public torch::autograd::Function<TimeStep> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& bias) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({logits, bias});
    return time_step(logits, bias);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<TimeStepBackward>("fox::time_step_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dlogits, dbias] = op.call(grads[0], saved[0], saved[1]);
    return {dlogits, dbias};
  }
};

at::Tensor time_step_forward_autograd(const at::Tensor& logits, const at::Tensor& bias) {
  if (wants_grad({&logits, &bias})) return TimeStep::apply(logits, bias);
  at::AutoDispatchBelowADInplaceOrView guard;
  return time_step(logits, bias);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("time_step(Tensor logits, Tensor bias) -> Tensor");
  m.def("time_step_backward(Tensor ddt, Tensor logits, Tensor bias) -> (Tensor dlogits, Tensor dbias)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("time_step", time_step_forward_cpu);
  m.impl("time_step_backward", time_step_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("time_step", time_step_forward_meta);
  m.impl("time_step_backward", time_step_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("time_step", time_step_forward_autograd);
  m.impl("time_step_backward", once_differentiable());
}

}  // namespace

at::Tensor time_step(const at::Tensor& logits, const at::Tensor& bias_C) {
  static const auto op = find_operator<TimeStepForward>("fox::time_step");
  return op.call(logits, bias_C);
}

at::Tensor time_step_reference(const at::Tensor& logits, const at::Tensor& bias_C) {
  const auto type = compute_type(logits.scalar_type());
  return at::softplus(cast(logits, type) + cast(bias_C, type));
}

}  // namespace fox::ops
