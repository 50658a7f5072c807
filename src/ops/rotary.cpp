#include "ops/rotary.h"

#include <fmt/format.h>

#include "base/error.h"
#include "kernels/cpu/rotary.h"
#include "ops/common.h"
#include "ops/rotary_table.h"

namespace fox::ops {
namespace {

using Rotate = at::Tensor(const at::Tensor&, double, int64_t);

void check_rotary(const at::Tensor& x, double base, int64_t offset) {
  check_floating("rotary", "x", x);
  check_dim("rotary", "x", x, 4, "(B, T, H, D)");
  if (x.size(3) % 2 != 0) {
    throw Error(fmt::format("rotary: x has shape {}", shape_string(x.sizes())),
                "the head dimension is even: its two halves are turned as pairs");
  }
  if (!(base > 0) || offset < 0) {
    throw Error(fmt::format("rotary: base is {}, offset {}", base, offset), "base is positive, offset at least 0");
  }
}

at::Tensor rotate_meta(const at::Tensor& x, double base, int64_t offset) {
  check_rotary(x, base, offset);
  return at::empty(x.sizes(), x.options());
}

at::Tensor rotate_cpu(const at::Tensor& x_in, double base, int64_t offset, bool inverse) {
  check_rotary(x_in, base, offset);
  const auto type = compute_type(x_in.scalar_type());
  auto x = cast(x_in, type);
  if (x.stride(3) != 1) x = x.contiguous();
  const auto table = rotary_table(x.size(1), x.size(3), base, offset, x.options());
  auto y = at::empty(x.sizes(), x.options());
  dispatch_real(type, [&]<class T>() {
    const kernels::RotaryParams<T> p{.x = x.const_data_ptr<T>(),
                                     .x_batch = x.stride(0),
                                     .x_time = x.stride(1),
                                     .x_head = x.stride(2),
                                     .cos = table.cos.const_data_ptr<T>(),
                                     .sin = table.sin.const_data_ptr<T>(),
                                     .batch = x.size(0),
                                     .time = x.size(1),
                                     .heads = x.size(2),
                                     .dim = x.size(3)};
    kernels::rotary(p, inverse, y.mutable_data_ptr<T>());
  });
  return cast(y, x_in.scalar_type());
}
at::Tensor rotary_forward_cpu(const at::Tensor& x, double base, int64_t offset) {
  return rotate_cpu(x, base, offset, false);
}
at::Tensor rotary_backward_cpu(const at::Tensor& dy, double base, int64_t offset) {
  return rotate_cpu(dy, base, offset, true);
}

class Rotary : public torch::autograd::Function<Rotary> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, double base, int64_t offset) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->saved_data["base"] = base;
    ctx->saved_data["offset"] = offset;
    return rotary(x, base, offset);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<Rotate>("fox::rotary_backward");
    return {op.call(grads[0], ctx->saved_data["base"].toDouble(), ctx->saved_data["offset"].toInt()), {}, {}};
  }
};

at::Tensor rotary_forward_autograd(const at::Tensor& x, double base, int64_t offset) {
  if (wants_grad({&x})) return Rotary::apply(x, base, offset);
  at::AutoDispatchBelowADInplaceOrView guard;
  return rotary(x, base, offset);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("rotary(Tensor x, float base, int offset=0) -> Tensor");
  m.def("rotary_backward(Tensor dy, float base, int offset=0) -> Tensor");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("rotary", rotary_forward_cpu);
  m.impl("rotary_backward", rotary_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("rotary", rotate_meta);
  m.impl("rotary_backward", rotate_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("rotary", rotary_forward_autograd);
  m.impl("rotary_backward", once_differentiable());
}

}  // namespace

at::Tensor rotary(const at::Tensor& x_BTHD, double base, int64_t offset) {
  static const auto op = find_operator<Rotate>("fox::rotary");
  return op.call(x_BTHD, base, offset);
}

at::Tensor rotary_reference(const at::Tensor& x_BTHD, double base, int64_t offset) {
  const int64_t time = x_BTHD.size(1), dim = x_BTHD.size(3);
  const auto doubles = x_BTHD.options().dtype(at::kDouble);
  const auto wavelength = at::pow(base, at::arange(0, dim, 2, doubles) / static_cast<double>(dim));
  const auto angle = at::arange(offset, offset + time, doubles).unsqueeze(1) / wavelength;
  const auto cos = angle.cos().to(x_BTHD.scalar_type()).unsqueeze(1),
             sin = angle.sin().to(cos.scalar_type()).unsqueeze(1);
  const auto halves = x_BTHD.chunk(2, -1);
  return at::cat({halves[0] * cos - halves[1] * sin, halves[0] * sin + halves[1] * cos}, -1);
}

}  // namespace fox::ops
