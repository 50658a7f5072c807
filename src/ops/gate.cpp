#include "ops/gate.h"

#include <fmt/format.h>

#include "base/error.h"
#include "kernels/cpu/gate.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

using GateGradients = std::tuple<at::Tensor, at::Tensor>;
using GateForward = at::Tensor(const at::Tensor&, const OptionalTensor&);
using GateBackward = GateGradients(const at::Tensor&, const at::Tensor&);

void check_gate(const at::Tensor& logits, const OptionalTensor& bias) {
  check_floating("log_sigmoid_gate", "logits", logits);
  if (logits.dim() < 1) {
    throw Error("log_sigmoid_gate: logits is a scalar", "its shape is (..., H)");
  }
  if (!bias) return;
  check_floating("log_sigmoid_gate", "bias", *bias);
  check_shape("log_sigmoid_gate", "bias", *bias, {logits.size(-1)}, "(H,)");
  check_device("log_sigmoid_gate", "bias", *bias, "logits", logits);
}

void check_gate_backward(const at::Tensor& dlog_f, const at::Tensor& log_f) {
  check_shape("log_sigmoid_gate_backward", "dlog_f", dlog_f, log_f.sizes(), "that of log_f");
  check_dtype("log_sigmoid_gate_backward", "dlog_f", dlog_f, log_f.scalar_type());
  check_dtype("log_sigmoid_gate_backward", "log_f", log_f,
              log_f.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
}

at::Tensor gate_forward_meta(const at::Tensor& logits, const OptionalTensor& bias) {
  check_gate(logits, bias);
  return at::empty(logits.sizes(), logits.options().dtype(compute_type(logits.scalar_type())));
}

at::Tensor gate_forward_cpu(const at::Tensor& logits, const OptionalTensor& bias) {
  check_gate(logits, bias);
  const auto type = compute_type(logits.scalar_type());
  const auto x = cast(logits, type).contiguous();
  const auto b = bias ? cast(*bias, type).contiguous() : at::Tensor();
  auto log_f = at::empty(x.sizes(), x.options());
  const int64_t heads = x.size(-1);
  dispatch_real(type, [&]<class T>() {
    kernels::log_sigmoid_gate(x.const_data_ptr<T>(), bias ? b.const_data_ptr<T>() : nullptr,
                              log_f.mutable_data_ptr<T>(), heads == 0 ? 0 : x.numel() / heads, heads);
  });
  return log_f;
}

GateGradients gate_backward_meta(const at::Tensor& dlog_f, const at::Tensor& log_f) {
  check_gate_backward(dlog_f, log_f);
  return {at::empty(log_f.sizes(), log_f.options()), at::empty({log_f.size(-1)}, log_f.options())};
}

GateGradients gate_backward_cpu(const at::Tensor& dlog_f, const at::Tensor& log_f) {
  check_gate_backward(dlog_f, log_f);
  const auto dy = dlog_f.contiguous(), y = log_f.contiguous();
  auto dlogits = at::empty(y.sizes(), y.options());
  const int64_t heads = y.size(-1);
  auto dbias = at::empty({heads}, y.options());
  dispatch_real(y.scalar_type(), [&]<class T>() {
    kernels::log_sigmoid_gate_backward(dy.const_data_ptr<T>(), y.const_data_ptr<T>(), dlogits.mutable_data_ptr<T>(),
                                       dbias.mutable_data_ptr<T>(), heads == 0 ? 0 : y.numel() / heads, heads);
  });
  return {dlogits, dbias};
}

class LogSigmoidGate : public torch::autograd::Function<LogSigmoidGate> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits,
                            const OptionalTensor& bias) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto log_f = log_sigmoid_gate(logits, bias);
    ctx->save_for_backward({log_f});
    ctx->saved_data["logits_type"] = static_cast<int64_t>(logits.scalar_type());
    if (bias) ctx->saved_data["bias_type"] = static_cast<int64_t>(bias->scalar_type());
    return log_f;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<GateBackward>("fox::log_sigmoid_gate_backward");
    auto [dlogits, dbias] = op.call(grads[0], ctx->get_saved_variables()[0]);
    const auto type = [&](const char* key) { return static_cast<at::ScalarType>(ctx->saved_data[key].toInt()); };
    if (ctx->saved_data.count("bias_type") == 0) return {cast(dlogits, type("logits_type")), {}};
    return {cast(dlogits, type("logits_type")), cast(dbias, type("bias_type"))};
  }
};

at::Tensor gate_forward_autograd(const at::Tensor& logits, const OptionalTensor& bias) {
  const auto b = value_or_undefined(bias);
  if (wants_grad({&logits, &b})) return LogSigmoidGate::apply(logits, bias);
  at::AutoDispatchBelowADInplaceOrView guard;
  return log_sigmoid_gate(logits, bias);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("log_sigmoid_gate(Tensor logits, Tensor? bias) -> Tensor");
  m.def("log_sigmoid_gate_backward(Tensor dlog_f, Tensor log_f) -> (Tensor dlogits, Tensor dbias)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("log_sigmoid_gate", gate_forward_cpu);
  m.impl("log_sigmoid_gate_backward", gate_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("log_sigmoid_gate", gate_forward_meta);
  m.impl("log_sigmoid_gate_backward", gate_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("log_sigmoid_gate", gate_forward_autograd);
  m.impl("log_sigmoid_gate_backward", once_differentiable());
}

}  // namespace

at::Tensor log_sigmoid_gate(const at::Tensor& logits, const std::optional<at::Tensor>& bias) {
  static const auto op = find_operator<GateForward>("fox::log_sigmoid_gate");
  return op.call(logits, bias);
}

at::Tensor log_sigmoid_gate_reference(const at::Tensor& logits, const std::optional<at::Tensor>& bias) {
  const auto x = logits.to(compute_type(logits.scalar_type()));
  return at::log_sigmoid(bias ? x + bias->to(x.scalar_type()) : x);
}

}  // namespace fox::ops
