#include "ops/swiglu.h"

#include <fmt/format.h>

#include "base/error.h"
#include "kernels/cpu/swiglu.h"
#include "ops/common.h"
#include "ops/swiglu_schema.h"

namespace fox::ops {
namespace {

at::DimVector output_shape(const at::Tensor& gate_up) {
  check_floating("swiglu", "gate_up", gate_up);
  if (gate_up.dim() < 1 || gate_up.size(-1) % 2 != 0) {
    throw Error(fmt::format("swiglu: gate_up has shape {}", shape_string(gate_up.sizes())),
                "its last dimension holds gate and value, so it is even");
  }
  at::DimVector shape(gate_up.sizes());
  shape.back() /= 2;
  return shape;
}

void check_swiglu_of_two(const at::Tensor& gate, const at::Tensor& value) {
  constexpr const char* kOp = "swiglu";
  check_floating(kOp, "gate", gate);
  if (gate.dim() < 1) throw Error("swiglu: gate is a number", "gate and value have a dimension at least");
  check_shape(kOp, "value", value, gate.sizes(), "that of gate");
  check_dtype(kOp, "value", value, gate.scalar_type());
  check_device(kOp, "value", value, "gate", gate);
}

/// gate_up's halves.
std::pair<at::Tensor, at::Tensor> halves_of(const at::Tensor& gate_up) {
  const int64_t width = gate_up.size(-1) / 2;
  return {gate_up.narrow(-1, 0, width), gate_up.narrow(-1, width, width)};
}

/// Result in the dtype of the computation.
at::Tensor swiglu_forward(const at::Tensor& gate, const at::Tensor& value) {
  const auto type = compute_type(gate.scalar_type());
  const SwigluInputs in(gate, value, type);
  auto out = at::empty(gate.sizes(), gate.options().dtype(type));
  dispatch_real(
      type, [&]<class T>() { kernels::swiglu(in.params<kernels::SwigluParams<T>, T>(), out.mutable_data_ptr<T>()); });
  return out;
}

/// Writes the gradients of gate and value into tensors of rows that far apart, in the dtype of the computation.
void swiglu_backward(const at::Tensor& dout, const at::Tensor& gate, const at::Tensor& value, const at::Tensor& dgate,
                     const at::Tensor& dvalue, int64_t stride) {
  const SwigluInputs in(gate, value, dgate.scalar_type());
  const auto dy = cast(dout, dgate.scalar_type()).contiguous();
  dispatch_real(dgate.scalar_type(), [&]<class T>() {
    kernels::swiglu_backward(in.params<kernels::SwigluParams<T>, T>(), dy.const_data_ptr<T>(),
                             {dgate.mutable_data_ptr<T>(), dvalue.mutable_data_ptr<T>(), stride});
  });
}

at::Tensor swiglu_forward_meta(const at::Tensor& gate_up) {
  return at::empty(output_shape(gate_up), gate_up.options());
}

at::Tensor swiglu_forward_cpu(const at::Tensor& gate_up) {
  output_shape(gate_up);
  const auto [gate, value] = halves_of(gate_up);
  return cast(swiglu_forward(gate, value), gate_up.scalar_type());
}

at::Tensor swiglu_backward_meta(const at::Tensor& dout, const at::Tensor& gate_up) {
  check_shape("swiglu_backward", "dout", dout, output_shape(gate_up), "(..., I)");
  return at::empty(gate_up.sizes(), gate_up.options());
}

at::Tensor swiglu_backward_cpu(const at::Tensor& dout, const at::Tensor& gate_up) {
  check_shape("swiglu_backward", "dout", dout, output_shape(gate_up), "(..., I)");
  const auto [gate, value] = halves_of(gate_up);
  auto dx = at::empty(gate_up.sizes(), gate_up.options().dtype(compute_type(gate_up.scalar_type())));
  const auto [dgate, dvalue] = halves_of(dx);
  swiglu_backward(dout, gate, value, dgate, dvalue, gate_up.size(-1));
  return cast(dx, gate_up.scalar_type());
}

at::Tensor swiglu_of_two_forward_meta(const at::Tensor& gate, const at::Tensor& value) {
  check_swiglu_of_two(gate, value);
  return at::empty(gate.sizes(), gate.options());
}

at::Tensor swiglu_of_two_forward_cpu(const at::Tensor& gate, const at::Tensor& value) {
  check_swiglu_of_two(gate, value);
  return cast(swiglu_forward(gate, value), gate.scalar_type());
}

SwigluOfTwoGradients swiglu_of_two_backward_meta(const at::Tensor& dout, const at::Tensor& gate,
                                                 const at::Tensor& value) {
  check_swiglu_of_two(gate, value);
  check_shape("swiglu_backward", "dout", dout, gate.sizes(), "that of gate");
  return {at::empty(gate.sizes(), gate.options()), at::empty(gate.sizes(), gate.options())};
}

SwigluOfTwoGradients swiglu_of_two_backward_cpu(const at::Tensor& dout, const at::Tensor& gate,
                                                const at::Tensor& value) {
  check_swiglu_of_two(gate, value);
  check_shape("swiglu_backward", "dout", dout, gate.sizes(), "that of gate");
  const auto options = gate.options().dtype(compute_type(gate.scalar_type()));
  const auto dgate = at::empty(gate.sizes(), options), dvalue = at::empty(gate.sizes(), options);
  swiglu_backward(dout, gate, value, dgate, dvalue, gate.size(-1));
  return {cast(dgate, gate.scalar_type()), cast(dvalue, gate.scalar_type())};
}

class Swiglu : public torch::autograd::Function<Swiglu> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate_up) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate_up});
    return swiglu(gate_up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<SwigluBackward>("fox::swiglu_backward");
    return {op.call(grads[0], ctx->get_saved_variables()[0])};
  }
};

class SwigluOfTwo : public torch::autograd::Function<SwigluOfTwo> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& gate, const at::Tensor& value) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({gate, value});
    return swiglu(gate, value);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<SwigluOfTwoBackward>("fox::swiglu_of_two_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dgate, dvalue] = op.call(grads[0], saved[0], saved[1]);
    return {dgate, dvalue};
  }
};

at::Tensor swiglu_of_two_forward_autograd(const at::Tensor& gate, const at::Tensor& value) {
  if (wants_grad({&gate, &value})) return SwigluOfTwo::apply(gate, value);
  at::AutoDispatchBelowADInplaceOrView guard;
  return swiglu(gate, value);
}

at::Tensor swiglu_forward_autograd(const at::Tensor& gate_up) {
  if (wants_grad({&gate_up})) return Swiglu::apply(gate_up);
  at::AutoDispatchBelowADInplaceOrView guard;
  return swiglu(gate_up);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor dout, Tensor gate_up) -> Tensor");
  m.def("swiglu_of_two(Tensor gate, Tensor value) -> Tensor");
  m.def("swiglu_of_two_backward(Tensor dout, Tensor gate, Tensor value) -> (Tensor dgate, Tensor dvalue)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("swiglu", swiglu_forward_cpu);
  m.impl("swiglu_backward", swiglu_backward_cpu);
  m.impl("swiglu_of_two", swiglu_of_two_forward_cpu);
  m.impl("swiglu_of_two_backward", swiglu_of_two_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("swiglu", swiglu_forward_meta);
  m.impl("swiglu_backward", swiglu_backward_meta);
  m.impl("swiglu_of_two", swiglu_of_two_forward_meta);
  m.impl("swiglu_of_two_backward", swiglu_of_two_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("swiglu", swiglu_forward_autograd);
  m.impl("swiglu_backward", once_differentiable());
  m.impl("swiglu_of_two", swiglu_of_two_forward_autograd);
  m.impl("swiglu_of_two_backward", once_differentiable());
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& value) {
  static const auto op = find_operator<SwigluOfTwoForward>("fox::swiglu_of_two");
  return op.call(gate, value);
}

at::Tensor swiglu(const at::Tensor& gate_up) {
  static const auto op = find_operator<SwigluForward>("fox::swiglu");
  return op.call(gate_up);
}

at::Tensor swiglu_reference(const at::Tensor& gate, const at::Tensor& value) { return at::silu(gate) * value; }

at::Tensor swiglu_reference(const at::Tensor& gate_up) {
  const auto halves = gate_up.chunk(2, -1);
  return swiglu_reference(halves[0], halves[1]);
}

}  // namespace fox::ops
