#include "ops/swiglu.h"

#include <fmt/format.h>

#include "base/error.h"
#include "kernels/cpu/swiglu.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

using SwigluForward = at::Tensor(const at::Tensor&);
using SwigluBackward = at::Tensor(const at::Tensor&, const at::Tensor&);

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

template <class T>
kernels::SwigluParams<T> swiglu_params(const Rows& gate_up) {
  return {gate_up.tensor.const_data_ptr<T>(), gate_up.stride, gate_up.rows, gate_up.width / 2};
}

at::Tensor swiglu_forward_meta(const at::Tensor& gate_up) {
  return at::empty(output_shape(gate_up), gate_up.options());
}

at::Tensor swiglu_forward_cpu(const at::Tensor& gate_up) {
  const auto shape = output_shape(gate_up);
  const auto x = as_rows(cast(gate_up, compute_type(gate_up.scalar_type())));
  auto out = at::empty(shape, x.tensor.options());
  dispatch_real(out.scalar_type(), [&]<class T>() { kernels::swiglu(swiglu_params<T>(x), out.mutable_data_ptr<T>()); });
  return cast(out, gate_up.scalar_type());
}

at::Tensor swiglu_backward_meta(const at::Tensor& dout, const at::Tensor& gate_up) {
  check_shape("swiglu_backward", "dout", dout, output_shape(gate_up), "(..., I)");
  return at::empty(gate_up.sizes(), gate_up.options());
}

at::Tensor swiglu_backward_cpu(const at::Tensor& dout, const at::Tensor& gate_up) {
  check_shape("swiglu_backward", "dout", dout, output_shape(gate_up), "(..., I)");
  const auto type = compute_type(gate_up.scalar_type());
  const auto x = as_rows(cast(gate_up, type));
  const auto dy = cast(dout, type).contiguous();
  auto dx = at::empty(gate_up.sizes(), x.tensor.options());
  dispatch_real(type, [&]<class T>() {
    kernels::swiglu_backward(swiglu_params<T>(x), dy.const_data_ptr<T>(), dx.mutable_data_ptr<T>());
  });
  return cast(dx, gate_up.scalar_type());
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

at::Tensor swiglu_forward_autograd(const at::Tensor& gate_up) {
  if (wants_grad({&gate_up})) return Swiglu::apply(gate_up);
  at::AutoDispatchBelowADInplaceOrView guard;
  return swiglu(gate_up);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("swiglu(Tensor gate_up) -> Tensor");
  m.def("swiglu_backward(Tensor dout, Tensor gate_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("swiglu", swiglu_forward_cpu);
  m.impl("swiglu_backward", swiglu_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("swiglu", swiglu_forward_meta);
  m.impl("swiglu_backward", swiglu_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("swiglu", swiglu_forward_autograd);
  m.impl("swiglu_backward", once_differentiable());
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up) {
  static const auto op = find_operator<SwigluForward>("fox::swiglu");
  return op.call(gate_up);
}

at::Tensor swiglu_reference(const at::Tensor& gate_up) {
  const auto halves = gate_up.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

}  // namespace fox::ops
