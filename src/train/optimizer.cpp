#include "train/optimizer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "checkpoint/hf_directory.h"

namespace fox::train {

AdamW::AdamW(const nn::Parameters& parameters, const AdamWOptions& options) : options_(options) {
  groups_.push_back({options.weight_decay, {}, {}, {}, {}, {}});
  groups_.push_back({0, {}, {}, {}, {}, {}});
  for (const auto& parameter : parameters) {
    if (!parameter.trainable) continue;
    Group& group = groups_[parameter.decay ? 0 : 1];
    group.names.push_back(parameter.name);
    group.parameters.push_back(parameter.tensor);
    group.exp_avg.push_back(at::zeros_like(parameter.tensor));
    group.exp_avg_sq.push_back(at::zeros_like(parameter.tensor));
    // The fused kernel counts in float32, exact up to 2^24 steps.
    group.step_counts.push_back(at::zeros({}, parameter.tensor.options().dtype(at::kFloat).requires_grad(false)));
  }
}

void AdamW::step(double lr) {
  const at::NoGradGuard no_grad;
  for (auto& group : groups_) {
    if (group.parameters.empty()) continue;
    std::vector<at::Tensor> gradients;
    gradients.reserve(group.parameters.size());
    for (const auto& parameter : group.parameters) {
      gradients.push_back(parameter.grad().defined() ? parameter.grad() : at::zeros_like(parameter));
    }
    at::_foreach_add_(group.step_counts, 1);
    at::_fused_adamw_(group.parameters, gradients, group.exp_avg, group.exp_avg_sq, /*max_exp_avg_sqs=*/{},
                      group.step_counts, lr, options_.beta1, options_.beta2, group.weight_decay, options_.eps,
                      /*amsgrad=*/false, /*maximize=*/false);
  }
  ++steps_;
}

checkpoint::NamedTensors AdamW::state() const {
  checkpoint::NamedTensors state;
  for (const auto& group : groups_) {
    for (size_t i = 0; i < group.names.size(); ++i) {
      state["exp_avg." + group.names[i]] = group.exp_avg[i];
      state["exp_avg_sq." + group.names[i]] = group.exp_avg_sq[i];
    }
  }
  return state;
}

void AdamW::restore(const checkpoint::NamedTensors& state, int64_t steps, const std::string& where) {
  const at::NoGradGuard no_grad;
  checkpoint::load_into(state, this->state(), where);
  for (auto& group : groups_) {
    for (auto& count : group.step_counts) count.fill_(steps);
  }
  steps_ = steps;
}

double gradient_norm(const nn::Parameters& parameters) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.tensor.grad();
    if (gradient.defined()) norms.push_back(at::linalg_vector_norm(gradient, 2, std::nullopt, false, at::kDouble));
  }
  return norms.empty() ? 0 : at::linalg_vector_norm(at::stack(norms)).item<double>();
}

void clip_gradients(const nn::Parameters& parameters, double norm, double max_norm) {
  const double factor = max_norm / (norm + 1e-6);
  if (factor >= 1) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    if (parameter.tensor.grad().defined()) gradients.push_back(parameter.tensor.grad());
  }
  if (!gradients.empty()) at::_foreach_mul_(gradients, factor);
}

}  // namespace fox::train
