#include "nn/recompute.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fox::nn {
namespace {

struct Held : torch::CustomClassHolder {
  explicit Held(TensorFunction function) : f(std::move(function)) {}
  TensorFunction f;
};

class Recomputed : public torch::autograd::Function<Recomputed> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, at::TensorList inputs,
                                                const TensorFunction& f) {
    ctx->save_for_backward(inputs.vec());
    ctx->saved_data["f"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(f));
    return f(inputs.vec());  // autograd is off in here
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto held = ctx->saved_data["f"].toCapsule();
    const auto saved = ctx->get_saved_variables();
    const at::AutoGradMode on(true);
    std::vector<at::Tensor> inputs;
    for (const auto& input : saved) inputs.push_back(input.detach().requires_grad_(input.requires_grad()));
    const auto outputs = static_cast<Held*>(held.get())->f(inputs);
    std::vector<at::Tensor> roots, root_grads;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!grads[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      root_grads.push_back(grads[i]);
    }
    torch::autograd::backward(roots, root_grads);  // parameters get their gradients here
    torch::autograd::variable_list result;
    for (const auto& input : inputs) result.push_back(input.grad());
    result.emplace_back();  // of f
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> recomputed(const TensorFunction& f, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return f(inputs);
  return Recomputed::apply(at::TensorList(inputs), f);
}

}  // namespace fox::nn
