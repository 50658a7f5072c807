#include "ops/add_rms_norm.h"

#include "ops/common.h"
#include "ops/rms_norm.h"

// The CPU side is a composition of other operators, on whatever device its tensors are: the CUDA side calls it for
// shapes that its kernel does not take.
namespace fox::ops {
namespace {

using AddRmsNormResults = std::tuple<at::Tensor, at::Tensor>;
/// dx, dbranch (undefined where it is dx), dweight.
using AddRmsNormGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using AddRmsNormForward = AddRmsNormResults(const at::Tensor&, const at::Tensor&, const at::Tensor&, double);
using AddRmsNormBackward = AddRmsNormGradients(const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                                               const at::Tensor&, double);

void check_add_rms_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight) {
  constexpr const char* kOp = "add_rms_norm";
  check_floating(kOp, "x", x);
  check_floating(kOp, "branch", branch);
  check_shape(kOp, "branch", branch, x.sizes(), "that of x");
  check_device(kOp, "branch", branch, "x", x);
  check_floating(kOp, "weight", weight);
  check_shape(kOp, "weight", weight, {x.dim() == 0 ? 1 : x.size(-1)}, "(C,)");
  check_device(kOp, "weight", weight, "x", x);
}

void check_add_rms_norm_backward(const OptionalTensor& dsum, const at::Tensor& dnormed, const at::Tensor& sum) {
  constexpr const char* kOp = "add_rms_norm_backward";
  check_shape(kOp, "dnormed", dnormed, sum.sizes(), "that of sum");
  if (dsum) check_shape(kOp, "dsum", *dsum, sum.sizes(), "that of sum");
}

AddRmsNormResults add_rms_norm_forward_meta(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                            double) {
  check_add_rms_norm(x, branch, weight);
  return {at::empty(x.sizes(), x.options()), at::empty(x.sizes(), branch.options())};
}

AddRmsNormResults forward_composed(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                   double eps) {
  check_add_rms_norm(x, branch, weight);
  auto sum = cast(x + branch, x.scalar_type()).contiguous();
  auto normed = cast(rms_norm(sum, weight, eps), branch.scalar_type());
  return {sum, normed};
}

AddRmsNormGradients add_rms_norm_backward_meta(const OptionalTensor& dsum, const at::Tensor& dnormed,
                                               const at::Tensor& sum, const at::Tensor& weight, double) {
  check_add_rms_norm_backward(dsum, dnormed, sum);
  const bool same = dnormed.scalar_type() == sum.scalar_type();
  return {at::empty(sum.sizes(), sum.options()), same ? at::Tensor() : at::empty(sum.sizes(), dnormed.options()),
          at::empty(weight.sizes(), weight.options())};
}

AddRmsNormGradients backward_composed(const OptionalTensor& dsum, const at::Tensor& dnormed, const at::Tensor& sum,
                                      const at::Tensor& weight, double eps) {
  static const auto norm_backward =
      find_operator<AddRmsNormResults(const at::Tensor&, const at::Tensor&, const OptionalTensor&, double, int64_t)>(
          "fox::rms_norm_backward");
  check_add_rms_norm_backward(dsum, dnormed, sum);
  auto [dx, dweight] = norm_backward.call(cast(dnormed, sum.scalar_type()), sum, weight, eps, 1);
  if (dsum) dx.add_(*dsum);
  const bool same = dnormed.scalar_type() == sum.scalar_type();
  return {dx, same ? at::Tensor() : dx.to(dnormed.scalar_type()), dweight};
}

class AddRmsNorm : public torch::autograd::Function<AddRmsNorm> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                                const at::Tensor& branch, const at::Tensor& weight, double eps) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [sum, normed] = add_rms_norm(x, branch, weight, eps);
    ctx->save_for_backward({sum, weight});
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["type"] = static_cast<int64_t>(branch.scalar_type());
    // The last norm of a model leaves a sum that nobody uses: no zeros are made and added for it.
    ctx->set_materialize_grads(false);
    return {sum, normed};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<AddRmsNormBackward>("fox::add_rms_norm_backward");
    const auto saved = ctx->get_saved_variables();
    const auto type = static_cast<at::ScalarType>(ctx->saved_data["type"].toInt());
    if (!grads[1].defined()) return {grads[0], cast(grads[0], type), {}, {}};
    auto [dx, dbranch, dweight] =
        op.call(optional_of(grads[0]), grads[1], saved[0], saved[1], ctx->saved_data["eps"].toDouble());
    return {dx, dbranch.defined() ? dbranch : dx, dweight, {}};
  }
};

AddRmsNormResults add_rms_norm_forward_autograd(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                                double eps) {
  static const auto op = find_operator<AddRmsNormForward>("fox::add_rms_norm");
  if (wants_grad({&x, &branch, &weight})) {
    const auto out = AddRmsNorm::apply(x, branch, weight, eps);
    return {out[0], out[1]};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, branch, weight, eps);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("add_rms_norm(Tensor x, Tensor branch, Tensor weight, float eps) -> (Tensor sum, Tensor normed)");
  m.def(
      "add_rms_norm_backward(Tensor? dsum, Tensor dnormed, Tensor sum, Tensor weight, float eps) "
      "-> (Tensor dx, Tensor dbranch, Tensor dweight)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("add_rms_norm", forward_composed);
  m.impl("add_rms_norm_backward", backward_composed);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("add_rms_norm", add_rms_norm_forward_meta);
  m.impl("add_rms_norm_backward", add_rms_norm_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("add_rms_norm", add_rms_norm_forward_autograd);
  m.impl("add_rms_norm_backward", once_differentiable());
}

}  // namespace

AddRmsNormResult add_rms_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight, double eps) {
  static const auto op = find_operator<AddRmsNormForward>("fox::add_rms_norm");
  auto [sum, normed] = op.call(x, branch, weight, eps);
  return {sum, normed};
}

AddRmsNormResult add_rms_norm_reference(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                        double eps) {
  const auto sum = (x + branch).to(x.scalar_type());
  return {sum, rms_norm_reference(sum, weight, eps).to(branch.scalar_type())};
}

}  // namespace fox::ops
