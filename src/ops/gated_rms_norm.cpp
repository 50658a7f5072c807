#include "ops/gated_rms_norm.h"

#include <fmt/format.h>

#include "base/error.h"
#include "kernels/cpu/rms_norm.h"
#include "ops/common.h"
#include "ops/gated_rms_norm_steps.h"
#include "ops/rms_norm.h"

namespace fox::ops {
namespace {

using GatedRmsNormForward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t, bool);
using GatedRmsNormBackward = GatedRmsNormGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                   const at::Tensor&, double, int64_t, bool);

void check_gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, int64_t num_groups) {
  constexpr const char* kOp = "gated_rms_norm";
  check_floating(kOp, "x", x);
  if (x.dim() < 1 || num_groups < 1 || x.size(-1) % num_groups != 0) {
    throw Error(fmt::format("gated_rms_norm: x has shape {} and num_groups is {}", shape_string(x.sizes()), num_groups),
                "num_groups divides the last dimension of x");
  }
  check_shape(kOp, "gate", gate, x.sizes(), "that of x");
  check_dtype(kOp, "gate", gate, x.scalar_type());
  check_device(kOp, "gate", gate, "x", x);
  check_floating(kOp, "weight", weight);
  check_device(kOp, "weight", weight, "x", x);
  const int64_t width = x.size(-1), group_width = width / num_groups;
  if (weight.dim() != 1 || (weight.size(0) != width && weight.size(0) != group_width)) {
    throw Error(fmt::format("gated_rms_norm: weight has shape {}", shape_string(weight.sizes())),
                fmt::format("supported: ({},), or ({},) shared by the groups", width, group_width));
  }
}

at::Tensor gated_rms_norm_forward_meta(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double,
                                       int64_t num_groups, bool) {
  check_gated_rms_norm(x, gate, weight, num_groups);
  return at::empty(x.sizes(), x.options());
}

/// The tensors in the dtype and layout that the kernel reads; it must outlive the kernel's parameters.
struct GatedRmsNormInputs {
  Rows x, gate;
  at::Tensor weight;

  GatedRmsNormInputs(const at::Tensor& x_in, const at::Tensor& gate_in, const at::Tensor& weight_in)
      : x(as_rows(cast(x_in, compute_type(x_in.scalar_type())))),
        gate(as_rows(cast(gate_in, compute_type(x_in.scalar_type())))),
        weight(cast(weight_in, compute_type(x_in.scalar_type())).contiguous()) {}

  template <class T>
  kernels::RmsNormParams<T> params(double eps, int64_t num_groups, bool silu) const {
    const int64_t width = x.width / num_groups;
    return {.x = x.tensor.const_data_ptr<T>(),
            .x_stride = x.stride,
            .weight = weight.const_data_ptr<T>(),
            .weight_stride = weight.size(0) == width ? 0 : width,
            .rows = x.rows,
            .groups = num_groups,
            .width = width,
            .eps = eps,
            .gate = gate.tensor.const_data_ptr<T>(),
            .gate_stride = gate.stride,
            .silu = silu};
  }
};

at::Tensor gated_rms_norm_forward_cpu(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                                      int64_t num_groups, bool silu) {
  check_gated_rms_norm(x, gate, weight, num_groups);
  const GatedRmsNormInputs in(x, gate, weight);
  auto y = at::empty(x.sizes(), in.x.tensor.options());
  dispatch_real(y.scalar_type(),
                [&]<class T>() { kernels::rms_norm(in.params<T>(eps, num_groups, silu), y.mutable_data_ptr<T>()); });
  return cast(y, x.scalar_type());
}

GatedRmsNormGradients gated_rms_norm_backward_meta(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate,
                                                   const at::Tensor& weight, double, int64_t num_groups, bool) {
  check_gated_rms_norm(x, gate, weight, num_groups);
  check_shape("gated_rms_norm_backward", "dy", dy, x.sizes(), "that of x");
  return {at::empty(x.sizes(), x.options()), at::empty(gate.sizes(), gate.options()),
          at::empty(weight.sizes(), weight.options())};
}

GatedRmsNormGradients gated_rms_norm_backward_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate,
                                                  const at::Tensor& weight, double eps, int64_t num_groups, bool silu) {
  check_gated_rms_norm(x, gate, weight, num_groups);
  check_shape("gated_rms_norm_backward", "dy", dy, x.sizes(), "that of x");
  const GatedRmsNormInputs in(x, gate, weight);
  const auto& options = in.x.tensor.options();
  const auto g = cast(dy, in.weight.scalar_type()).contiguous();
  auto dx = at::empty(x.sizes(), options), dgate = at::empty(x.sizes(), options);
  auto dweight = at::empty(weight.sizes(), options);
  dispatch_real(in.weight.scalar_type(), [&]<class T>() {
    const auto p = in.params<T>(eps, num_groups, silu);
    const at::Tensor workspace = at::empty({kernels::rms_norm_backward_workspace(p)}, options);
    kernels::rms_norm_backward(p, g.const_data_ptr<T>(), dx.mutable_data_ptr<T>(), dweight.mutable_data_ptr<T>(),
                               workspace.mutable_data_ptr<T>(), dgate.mutable_data_ptr<T>());
  });
  return {cast(dx, x.scalar_type()), cast(dgate, gate.scalar_type()), cast(dweight, weight.scalar_type())};
}

class GatedRmsNorm : public torch::autograd::Function<GatedRmsNorm> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& gate,
                            const at::Tensor& weight, double eps, int64_t num_groups, bool silu) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, gate, weight});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["num_groups"] = num_groups;
    ctx->saved_data["silu"] = silu;
    return gated_rms_norm(x, gate, weight, eps, num_groups, silu);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<GatedRmsNormBackward>("fox::gated_rms_norm_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dx, dgate, dweight] = op.call(grads[0], saved[0], saved[1], saved[2], ctx->saved_data["eps"].toDouble(),
                                        ctx->saved_data["num_groups"].toInt(), ctx->saved_data["silu"].toBool());
    return {dx, dgate, dweight, {}, {}, {}};
  }
};

at::Tensor gated_rms_norm_forward_autograd(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                                           double eps, int64_t num_groups, bool silu) {
  if (wants_grad({&x, &gate, &weight})) return GatedRmsNorm::apply(x, gate, weight, eps, num_groups, silu);
  at::AutoDispatchBelowADInplaceOrView guard;
  return gated_rms_norm(x, gate, weight, eps, num_groups, silu);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int num_groups, bool silu) -> Tensor");
  m.def(
      "gated_rms_norm_backward(Tensor dy, Tensor x, Tensor gate, Tensor weight, float eps, int num_groups, bool silu) "
      "-> (Tensor dx, Tensor dgate, Tensor dweight)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("gated_rms_norm", gated_rms_norm_forward_cpu);
  m.impl("gated_rms_norm_backward", gated_rms_norm_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("gated_rms_norm", gated_rms_norm_forward_meta);
  m.impl("gated_rms_norm_backward", gated_rms_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("gated_rms_norm", gated_rms_norm_forward_autograd);
  m.impl("gated_rms_norm_backward", once_differentiable());
}

}  // namespace

at::Tensor gated_rms_norm_steps(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                                int64_t num_groups, bool silu) {
  const auto type = compute_type(x.scalar_type());
  const auto z = cast(gate, type);
  const auto normed = rms_norm(cast(x, type), weight, eps, num_groups);
  return cast(normed * (silu ? at::silu(z) : at::sigmoid(z)), x.scalar_type());
}

GatedRmsNormGradients gated_rms_norm_backward_steps(const at::Tensor& dy, const at::Tensor& x_in,
                                                    const at::Tensor& gate, const at::Tensor& weight, double eps,
                                                    int64_t num_groups, bool silu) {
  static const auto norm_backward = find_operator<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, int64_t)>(
      "fox::rms_norm_backward");
  const auto type = compute_type(x_in.scalar_type());
  const auto x = cast(x_in, type), z = cast(gate, type), g = cast(dy, type);
  const auto active = silu ? at::silu(z) : at::sigmoid(z);
  auto [dx, dweight] = norm_backward.call(g * active, x, weight, eps, num_groups);
  const auto dactive = g * rms_norm(x, weight, eps, num_groups);
  const auto dgate = silu ? at::silu_backward(dactive, z) : at::sigmoid_backward(dactive, active);
  return {cast(dx, x_in.scalar_type()), cast(dgate, gate.scalar_type()), dweight};
}

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                          int64_t num_groups, bool silu) {
  static const auto op = find_operator<GatedRmsNormForward>("fox::gated_rms_norm");
  return op.call(x, gate, weight, eps, num_groups, silu);
}

at::Tensor gated_rms_norm_reference(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                                    int64_t num_groups, bool silu) {
  return rms_norm_reference(x, weight, eps, num_groups) * (silu ? at::silu(gate) : at::sigmoid(gate));
}

}  // namespace fox::ops
