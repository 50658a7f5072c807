#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "checkpoint/hf_directory.h"
#include "nn/packed_weights.h"

namespace fox::train {

at::Tensor GradientNorms::divisor(double max_norm) const { return ((global + 1e-6) / max_norm).clamp_min(1); }

GradientNorms gradient_norms(const nn::Parameters& parameters) {
  const at::NoGradGuard no_grad;
  GradientNorms norms;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].tensor.grad();
    if (!gradient.defined()) continue;
    norms.parameters.push_back(i);
    gradients.push_back(gradient);
  }
  if (gradients.empty()) throw Error("no parameter has a gradient", "call backward on a loss first");
  norms.each = at::stack(at::_foreach_norm(gradients, 2, at::kDouble));
  norms.global = at::linalg_vector_norm(norms.each);
  return norms;
}

AdamW::AdamW(const nn::Parameters& parameters, const AdamWOptions& options, at::Device device) : options_(options) {
  groups_.push_back({options.weight_decay, {}, {}, {}, {}});
  groups_.push_back({0, {}, {}, {}, {}});
  steps_ = at::zeros({}, at::dtype(at::kFloat).device(device));
  for (const auto& parameter : parameters) {
    if (!parameter.trainable) continue;
    Group& group = groups_[parameter.decay ? 0 : 1];
    group.names.push_back(parameter.name);
    group.parameters.push_back(parameter.tensor);
    group.exp_avg.push_back(at::zeros_like(parameter.tensor));
    group.exp_avg_sq.push_back(at::zeros_like(parameter.tensor));
  }
}

void AdamW::step(const at::Tensor& lr, const StepGuard& guard) {
  const at::NoGradGuard no_grad;
  const auto skip = guard.apply.logical_not().to(at::kFloat);
  steps_ += 1 - skip;
  for (auto& group : groups_) {
    if (!group.parameters.empty()) step(group, lr, guard, skip);
  }
}

void AdamW::step(Group& group, const at::Tensor& lr, const StepGuard& guard, const at::Tensor& skip) {
  std::vector<at::Tensor> gradients;
  gradients.reserve(group.parameters.size());
  for (const auto& parameter : group.parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter));
  }
  // The fused kernel divides as it reads, by a float32: too coarse for float64.
  const bool divide_first = group.parameters.front().scalar_type() == at::kDouble;
  std::optional<at::Tensor> divisor;
  if (divide_first) {
    at::_foreach_mul_(gradients, guard.divisor.reciprocal());
  } else {
    divisor = guard.divisor.to(at::kFloat);
  }
  const std::vector<at::Tensor> counts(gradients.size(), steps_);
  at::_fused_adamw_(group.parameters, gradients, group.exp_avg, group.exp_avg_sq, /*max_exp_avg_sqs=*/{}, counts, lr,
                    options_.beta1, options_.beta2, group.weight_decay, options_.eps, /*amsgrad=*/false,
                    /*maximize=*/false, divisor, skip);
  for (const auto& parameter : group.parameters) nn::mark_changed(parameter);
}

void AdamW::step(double lr) {
  const auto options = steps_.options();
  step(device_lr(lr), {at::ones({}, options.dtype(at::kDouble)), at::ones({}, options.dtype(at::kBool))});
}

at::Tensor AdamW::device_lr(double lr) const {
  return at::full({}, lr, steps_.options().dtype(steps_.is_cpu() ? at::kDouble : at::kFloat));
}

int64_t AdamW::steps() const { return static_cast<int64_t>(steps_.item<float>()); }

checkpoint::NamedTensors AdamW::state() const {
  checkpoint::NamedTensors state;
  for (const auto& group : groups_) {
    for (size_t i = 0; i < group.names.size(); ++i) {
      state[kMoments[0] + group.names[i]] = group.exp_avg[i];
      state[kMoments[1] + group.names[i]] = group.exp_avg_sq[i];
    }
  }
  return state;
}

void AdamW::restore(const checkpoint::NamedTensors& state, int64_t steps, const std::string& where) {
  const at::NoGradGuard no_grad;
  checkpoint::load_into(state, this->state(), where);
  set_steps(steps);
}

void AdamW::set_steps(int64_t steps) { steps_.fill_(steps); }

}  // namespace fox::train
