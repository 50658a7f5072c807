#include "ops/gated_rms_norm.h"

#include "ops/common.h"
#include "ops/rms_norm.h"

// The CPU side is a composition of other operators, on whatever device its tensors are: the CUDA side calls it for
// shapes that its kernel does not take.
namespace fox::ops {
namespace {

/// dx, dgate, dweight.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Forward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t, bool);
using Backward = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t,
                           bool);

// What rms_norm does not check itself.
void check(const at::Tensor& x, const at::Tensor& gate) {
  constexpr const char* kOp = "gated_rms_norm";
  check_shape(kOp, "gate", gate, x.sizes(), "that of x");
  check_dtype(kOp, "gate", gate, x.scalar_type());
  check_device(kOp, "gate", gate, "x", x);
}

at::Tensor forward_meta(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                        int64_t num_groups, bool) {
  check(x, gate);
  return rms_norm(x, weight, eps, num_groups);
}

at::Tensor forward_composed(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                            int64_t num_groups, bool silu) {
  check(x, gate);
  const auto type = compute_type(x.scalar_type());
  const auto z = cast(gate, type);
  return cast(rms_norm(cast(x, type), weight, eps, num_groups).mul_(silu ? at::silu(z) : at::sigmoid(z)),
              x.scalar_type());
}

Gradients backward_meta(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight,
                        double, int64_t, bool) {
  check(x, gate);
  check_shape("gated_rms_norm_backward", "dy", dy, x.sizes(), "that of x");
  return {at::empty(x.sizes(), x.options()), at::empty(gate.sizes(), gate.options()),
          at::empty(weight.sizes(), weight.options())};
}

Gradients backward_composed(const at::Tensor& dy, const at::Tensor& x_in, const at::Tensor& gate,
                            const at::Tensor& weight, double eps, int64_t num_groups, bool silu) {
  static const auto norm_backward = find_operator<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, int64_t)>(
      "fox::rms_norm_backward");
  check(x_in, gate);
  check_shape("gated_rms_norm_backward", "dy", dy, x_in.sizes(), "that of x");
  const auto type = compute_type(x_in.scalar_type());
  const auto x = cast(x_in, type), z = cast(gate, type), g = cast(dy, type);
  const auto active = silu ? at::silu(z) : at::sigmoid(z);
  auto [dx, dweight] = norm_backward.call(g * active, x, weight, eps, num_groups);
  const auto dactive = rms_norm(x, weight, eps, num_groups).mul_(g);
  const auto dgate = silu ? at::silu_backward(dactive, z) : at::sigmoid_backward(dactive, active);
  return {cast(dx, x_in.scalar_type()), cast(dgate, gate.scalar_type()), dweight};
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
    static const auto op = find_operator<Backward>("fox::gated_rms_norm_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dx, dgate, dweight] = op.call(grads[0], saved[0], saved[1], saved[2], ctx->saved_data["eps"].toDouble(),
                                        ctx->saved_data["num_groups"].toInt(), ctx->saved_data["silu"].toBool());
    return {dx, dgate, dweight, {}, {}, {}};
  }
};

at::Tensor forward_autograd(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                            int64_t num_groups, bool silu) {
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
  m.impl("gated_rms_norm", forward_composed);
  m.impl("gated_rms_norm_backward", backward_composed);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("gated_rms_norm", forward_meta);
  m.impl("gated_rms_norm_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("gated_rms_norm", forward_autograd);
  m.impl("gated_rms_norm_backward", once_differentiable());
}

}  // namespace

at::Tensor gated_rms_norm(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                          int64_t num_groups, bool silu) {
  static const auto op = find_operator<Forward>("fox::gated_rms_norm");
  return op.call(x, gate, weight, eps, num_groups, silu);
}

at::Tensor gated_rms_norm_reference(const at::Tensor& x, const at::Tensor& gate, const at::Tensor& weight, double eps,
                                    int64_t num_groups, bool silu) {
  return rms_norm_reference(x, weight, eps, num_groups) * (silu ? at::silu(gate) : at::sigmoid(gate));
}

}  // namespace fox::ops
