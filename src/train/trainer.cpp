#include "train/trainer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"

namespace fox::train {
namespace {

constexpr int64_t kIgnored = -100;

int64_t count_labels(const at::Tensor& labels_BT) { return labels_BT.ne(kIgnored).sum().item<int64_t>(); }

/// The first parameter whose gradient is not finite, for the message.
std::string name_of_bad_gradient(const nn::Parameters& parameters) {
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.tensor.grad();
    if (gradient.defined() && !at::isfinite(gradient).all().item<bool>()) return "the gradient of " + parameter.name;
  }
  return "the gradient norm";
}

}  // namespace

Trainer::Trainer(model::LanguageModel& model, const TrainerOptions& options)
    : model_(model), options_(options), optimizer_(model.parameters(), options.adamw) {
  model_.set_requires_grad(true);
}

double Trainer::backward(std::span<const data::Batch> micro_batches, StepResult& result) {
  int64_t labels = 0;
  for (const auto& batch : micro_batches) labels += count_labels(batch.labels_BT);
  if (labels == 0) throw Error("no label of this training step counts", "all of them are marked as ignored (-100)");

  const bool whole = micro_batches.size() == 1;  // the model's own mean is then the mean over the step
  const auto type = model_.parameters().front().tensor.scalar_type();
  double loss = 0;
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    const auto& batch = micro_batches[i];
    std::optional<at::Tensor> weight_BT;
    if (!whole) {
      weight_BT =
          at::full(batch.labels_BT.sizes(), 1.0 / static_cast<double>(labels), batch.labels_BT.options().dtype(type));
    }
    at::Tensor total;
    try {
      total = model_.loss(batch.ids_BT, batch.labels_BT, {}, weight_BT).total;
    } catch (const NonFiniteError& error) {
      result.fault = fmt::format("in micro-batch {} of {}: {}", i + 1, micro_batches.size(), error.what());
      return std::nan("");
    }
    const double value = total.item<double>();
    loss += value;
    if (!std::isfinite(value)) {
      result.fault = fmt::format("the loss of micro-batch {} of {} is {}", i + 1, micro_batches.size(), value);
      break;
    }
    total.backward();
  }
  return loss;
}

StepResult Trainer::step(std::span<const data::Batch> micro_batches) {
  StepResult result;
  result.step = state_.step + 1;
  result.tokens = state_.tokens;
  result.lr = options_.schedule.at(state_.tokens);
  for (const auto& batch : micro_batches) result.tokens += batch.ids_BT.numel();

  const auto& parameters = model_.parameters();
  for (const auto& parameter : parameters) parameter.tensor.mutable_grad().reset();
  result.loss = backward(micro_batches, result);
  result.grad_norm = result.fault.empty() ? gradient_norm(parameters) : std::nan("");
  if (result.fault.empty() && !std::isfinite(result.grad_norm)) {
    result.fault = fmt::format("{} is not finite", name_of_bad_gradient(parameters));
  }

  if (result.fault.empty()) {
    clip_gradients(parameters, result.grad_norm, options_.max_grad_norm);
    optimizer_.step(result.lr);
    state_.bad_steps = 0;
  } else {
    ++state_.bad_steps;
  }
  state_.step = result.step;
  state_.tokens = result.tokens;
  return result;
}

nlohmann::json Trainer::state_json() const {
  return {{"step", state_.step},
          {"tokens", state_.tokens},
          {"bad_steps", state_.bad_steps},
          {"optimizer_steps", optimizer_.steps()}};
}

void Trainer::restore(const nlohmann::json& state, const checkpoint::NamedTensors& tensors, const std::string& where) {
  try {
    state_ = {state.at("step").get<int64_t>(), state.at("tokens").get<int64_t>(), state.at("bad_steps").get<int64_t>()};
    optimizer_.restore(tensors, state.at("optimizer_steps").get<int64_t>(), where);
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("{}: not the state of a trainer: {}", where, error.what()),
                "the checkpoint was written by another version, or changed since");
  }
}

}  // namespace fox::train
