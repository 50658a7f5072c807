#include "ops/hgrn2_gate.h"

#include "base/error.h"
#include "kernels/cpu/hgrn2_gate.h"
#include "ops/common.h"
#include "ops/hgrn2_gate_schema.h"

namespace fox::ops {
namespace {

void check_hgrn2_gate(const at::Tensor& logits, const OptionalTensor& lower) {
  constexpr const char* kOp = "hgrn2_gate";
  check_floating(kOp, "logits", logits);
  if (logits.dim() < 1) throw Error("hgrn2_gate: logits is a number", "its last dimension holds the channels");
  if (!lower) return;
  check_floating(kOp, "lower", *lower);
  check_shape(kOp, "lower", *lower, {logits.size(-1)}, "(C,)");
  check_device(kOp, "lower", *lower, "logits", logits);
}

void check_hgrn2_gate_backward(const at::Tensor& dlog_g, const at::Tensor& dk, const at::Tensor& logits,
                               const OptionalTensor& lower) {
  check_hgrn2_gate(logits, lower);
  for (const auto& [name, gradient] : {std::pair{"dlog_g", &dlog_g}, {"dk", &dk}}) {
    check_shape("hgrn2_gate_backward", name, *gradient, logits.sizes(), "that of logits");
  }
}

/// The tensors in the dtype and layout that the kernel reads; it must outlive the kernel's parameters.
struct Hgrn2GateInputs {
  Rows logits;
  at::Tensor lower;

  Hgrn2GateInputs(const at::Tensor& logits_in, const OptionalTensor& lower_in)
      : logits(as_rows(cast(logits_in, compute_type(logits_in.scalar_type())))) {
    if (lower_in) lower = cast(*lower_in, logits.tensor.scalar_type()).contiguous();
  }
  template <class T>
  kernels::Hgrn2GateParams<T> params() const {
    return {.logits = logits.tensor.const_data_ptr<T>(),
            .stride = logits.stride,
            .lower = lower.defined() ? lower.const_data_ptr<T>() : nullptr,
            .rows = logits.rows,
            .channels = logits.width};
  }
};

Hgrn2GateResults hgrn2_gate_forward_meta(const at::Tensor& logits, const OptionalTensor& lower) {
  check_hgrn2_gate(logits, lower);
  return {at::empty(logits.sizes(), logits.options().dtype(compute_type(logits.scalar_type()))),
          at::empty(logits.sizes(), logits.options())};
}

Hgrn2GateResults hgrn2_gate_forward_cpu(const at::Tensor& logits, const OptionalTensor& lower) {
  check_hgrn2_gate(logits, lower);
  const Hgrn2GateInputs in(logits, lower);
  const auto options = in.logits.tensor.options();
  const auto log_g = at::empty(logits.sizes(), options), k = at::empty(logits.sizes(), options);
  dispatch_real(log_g.scalar_type(), [&]<class T>() {
    kernels::hgrn2_gate(in.params<T>(), log_g.mutable_data_ptr<T>(), k.mutable_data_ptr<T>());
  });
  return {log_g, cast(k, logits.scalar_type())};
}

Hgrn2GateGradients hgrn2_gate_backward_meta(const at::Tensor& dlog_g, const at::Tensor& dk, const at::Tensor& logits,
                                            const OptionalTensor& lower) {
  check_hgrn2_gate_backward(dlog_g, dk, logits, lower);
  return {at::empty(logits.sizes(), logits.options()),
          lower ? at::empty(lower->sizes(), lower->options()) : at::Tensor()};
}

// With s = σ(z), s' = 1 - s and f = 1 - l: dz = (dlog_g / g - dk) f s s', dl = Σ (dlog_g / g - dk) s'. Without a bound
// g is s, which cancels: it may be 0.
Hgrn2GateGradients hgrn2_gate_backward_cpu(const at::Tensor& dlog_g, const at::Tensor& dk, const at::Tensor& logits,
                                           const OptionalTensor& lower) {
  check_hgrn2_gate_backward(dlog_g, dk, logits, lower);
  const Hgrn2GateInputs in(logits, lower);
  const auto type = in.logits.tensor.scalar_type();
  const auto dlog = cast(dlog_g, type).contiguous(), d_k = cast(dk, type).contiguous();
  const auto dlogits = at::empty(logits.sizes(), dlog.options());
  const at::Tensor dlower = lower ? at::empty(lower->sizes(), dlog.options()) : at::Tensor();
  dispatch_real(type, [&]<class T>() {
    kernels::hgrn2_gate_backward(in.params<T>(), dlog.const_data_ptr<T>(), d_k.const_data_ptr<T>(),
                                 dlogits.mutable_data_ptr<T>(), lower ? dlower.mutable_data_ptr<T>() : nullptr);
  });
  return {cast(dlogits, logits.scalar_type()), lower ? cast(dlower, lower->scalar_type()) : dlower};
}

class Hgrn2GateFunction : public torch::autograd::Function<Hgrn2GateFunction> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits,
                                                const OptionalTensor& lower) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({logits, value_or_undefined(lower)});
    const auto gate = hgrn2_gate(logits, lower);
    return {gate.log_g, gate.k};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<Hgrn2GateBackward>("fox::hgrn2_gate_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dlogits, dlower] = op.call(grads[0], grads[1], saved[0], optional_of(saved[1]));
    return {dlogits, dlower};
  }
};

Hgrn2GateResults hgrn2_gate_forward_autograd(const at::Tensor& logits, const OptionalTensor& lower) {
  const auto l = value_or_undefined(lower);
  if (wants_grad({&logits, &l})) {
    const auto results = Hgrn2GateFunction::apply(logits, lower);
    return {results[0], results[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  const auto gate = hgrn2_gate(logits, lower);
  return {gate.log_g, gate.k};
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("hgrn2_gate(Tensor logits, Tensor? lower=None) -> (Tensor log_g, Tensor k)");
  m.def(
      "hgrn2_gate_backward(Tensor dlog_g, Tensor dk, Tensor logits, Tensor? lower) -> (Tensor dlogits, Tensor dlower)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("hgrn2_gate", hgrn2_gate_forward_cpu);
  m.impl("hgrn2_gate_backward", hgrn2_gate_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("hgrn2_gate", hgrn2_gate_forward_meta);
  m.impl("hgrn2_gate_backward", hgrn2_gate_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("hgrn2_gate", hgrn2_gate_forward_autograd);
  m.impl("hgrn2_gate_backward", once_differentiable());
}

}  // namespace

Hgrn2Gate hgrn2_gate(const at::Tensor& logits, const std::optional<at::Tensor>& lower_C) {
  static const auto op = find_operator<Hgrn2GateForward>("fox::hgrn2_gate");
  const auto [log_g, k] = op.call(logits, lower_C);
  return {log_g, k};
}

Hgrn2Gate hgrn2_gate_reference(const at::Tensor& logits, const std::optional<at::Tensor>& lower_C) {
  const auto z = cast(logits, compute_type(logits.scalar_type())), closed = at::sigmoid(-z);
  if (!lower_C) return {at::log_sigmoid(z), cast(closed, logits.scalar_type())};
  const auto lower = cast(*lower_C, z.scalar_type()), free = 1 - lower;
  return {(lower + free * at::sigmoid(z)).log(), cast(free * closed, logits.scalar_type())};
}

}  // namespace fox::ops
