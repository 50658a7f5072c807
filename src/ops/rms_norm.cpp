#include "ops/rms_norm.h"

#include <fmt/format.h>

#include "base/error.h"
#include "kernels/cpu/rms_norm.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

using RmsNormGradients = std::tuple<at::Tensor, at::Tensor>;
using RmsNormForward = at::Tensor(const at::Tensor&, const OptionalTensor&, double, int64_t);
using RmsNormBackward = RmsNormGradients(const at::Tensor&, const at::Tensor&, const OptionalTensor&, double, int64_t);

void check_rms_norm(const at::Tensor& x, const OptionalTensor& weight, int64_t num_groups) {
  check_floating("rms_norm", "x", x);
  if (x.dim() < 1 || num_groups < 1 || x.size(-1) % num_groups != 0) {
    throw Error(fmt::format("rms_norm: x has shape {} and num_groups is {}", shape_string(x.sizes()), num_groups),
                "num_groups divides the last dimension of x");
  }
  if (!weight) return;
  check_floating("rms_norm", "weight", *weight);
  check_device("rms_norm", "weight", *weight, "x", x);
  const int64_t width = x.size(-1), group_width = width / num_groups;
  if (weight->dim() != 1 || (weight->size(0) != width && weight->size(0) != group_width)) {
    throw Error(fmt::format("rms_norm: weight has shape {}", shape_string(weight->sizes())),
                fmt::format("supported: ({},), or ({},) shared by the groups", width, group_width));
  }
}

template <class T>
kernels::RmsNormParams<T> rms_norm_params(const Rows& x, const at::Tensor& weight, double eps, int64_t num_groups) {
  const int64_t width = x.width / num_groups;
  const bool shared = weight.defined() && weight.size(0) == width;
  return {x.tensor.const_data_ptr<T>(),
          x.stride,
          weight.defined() ? weight.const_data_ptr<T>() : nullptr,
          shared ? 0 : width,
          x.rows,
          num_groups,
          width,
          eps};
}

at::Tensor compute_weight(const OptionalTensor& weight, at::ScalarType type) {
  return weight ? cast(*weight, type).contiguous() : at::Tensor();
}

at::Tensor rms_norm_forward_meta(const at::Tensor& x, const OptionalTensor& weight, double, int64_t num_groups) {
  check_rms_norm(x, weight, num_groups);
  return at::empty(x.sizes(), x.options());
}

at::Tensor rms_norm_forward_cpu(const at::Tensor& x, const OptionalTensor& weight, double eps, int64_t num_groups) {
  check_rms_norm(x, weight, num_groups);
  const auto type = compute_type(x.scalar_type());
  const auto rows = as_rows(cast(x, type));
  const auto w = compute_weight(weight, type);
  auto y = at::empty(x.sizes(), rows.tensor.options());
  dispatch_real(type, [&]<class T>() {
    kernels::rms_norm(rms_norm_params<T>(rows, w, eps, num_groups), y.mutable_data_ptr<T>());
  });
  return cast(y, x.scalar_type());
}

RmsNormGradients rms_norm_backward_meta(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight, double,
                                        int64_t num_groups) {
  check_rms_norm(x, weight, num_groups);
  check_shape("rms_norm_backward", "dy", dy, x.sizes(), "that of x");
  return {at::empty(x.sizes(), x.options()), weight ? at::empty(weight->sizes(), weight->options()) : at::Tensor()};
}

RmsNormGradients rms_norm_backward_cpu(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight,
                                       double eps, int64_t num_groups) {
  check_rms_norm(x, weight, num_groups);
  check_shape("rms_norm_backward", "dy", dy, x.sizes(), "that of x");
  const auto type = compute_type(x.scalar_type());
  const auto rows = as_rows(cast(x, type));
  const auto w = compute_weight(weight, type);
  const auto g = cast(dy, type).contiguous();
  auto dx = at::empty(x.sizes(), rows.tensor.options());
  auto dw = weight ? at::empty(w.sizes(), w.options()) : at::Tensor();
  dispatch_real(type, [&]<class T>() {
    const auto p = rms_norm_params<T>(rows, w, eps, num_groups);
    const at::Tensor workspace =
        weight ? at::empty({kernels::rms_norm_backward_workspace(p)}, w.options()) : at::Tensor();
    kernels::rms_norm_backward(p, g.const_data_ptr<T>(), dx.mutable_data_ptr<T>(),
                               weight ? dw.mutable_data_ptr<T>() : nullptr,
                               weight ? workspace.mutable_data_ptr<T>() : nullptr);
  });
  return {cast(dx, x.scalar_type()), weight ? cast(dw, weight->scalar_type()) : dw};
}

class RmsNorm : public torch::autograd::Function<RmsNorm> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const OptionalTensor& weight,
                            double eps, int64_t num_groups) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, value_or_undefined(weight)});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["num_groups"] = num_groups;
    return rms_norm(x, weight, eps, num_groups);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<RmsNormBackward>("fox::rms_norm_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dx, dweight] = op.call(grads[0], saved[0], optional_of(saved[1]), ctx->saved_data["eps"].toDouble(),
                                 ctx->saved_data["num_groups"].toInt());
    return {dx, dweight, {}, {}};
  }
};

at::Tensor rms_norm_forward_autograd(const at::Tensor& x, const OptionalTensor& weight, double eps,
                                     int64_t num_groups) {
  const auto w = value_or_undefined(weight);
  if (wants_grad({&x, &w})) return RmsNorm::apply(x, weight, eps, num_groups);
  at::AutoDispatchBelowADInplaceOrView guard;
  return rms_norm(x, weight, eps, num_groups);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, int num_groups=1) -> Tensor");
  m.def(
      "rms_norm_backward(Tensor dy, Tensor x, Tensor? weight, float eps, int num_groups=1) "
      "-> (Tensor dx, Tensor dweight)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("rms_norm", rms_norm_forward_cpu);
  m.impl("rms_norm_backward", rms_norm_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("rms_norm", rms_norm_forward_meta);
  m.impl("rms_norm_backward", rms_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("rms_norm", rms_norm_forward_autograd);
  m.impl("rms_norm_backward", once_differentiable());
}

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps, int64_t num_groups) {
  static const auto op = find_operator<RmsNormForward>("fox::rms_norm");
  return op.call(x, weight, eps, num_groups);
}

at::Tensor rms_norm_reference(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps,
                              int64_t num_groups) {
  auto groups = x.to(compute_type(x.scalar_type())).unflatten(-1, {num_groups, x.size(-1) / num_groups});
  auto y = groups * at::rsqrt(groups.square().mean(-1, true) + eps);
  if (weight) y = y * (weight->numel() == x.size(-1) ? weight->view({num_groups, -1}) : *weight);
  return y.flatten(-2).to(x.scalar_type());
}

}  // namespace fox::ops
