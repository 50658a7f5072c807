#include "train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "train/device_numbers.h"

namespace fox::train {
namespace {

constexpr int64_t kIgnored = -100;

int64_t count_labels(std::span<const data::Batch> micro_batches) {
  int64_t labels = 0;
  for (const auto& batch : micro_batches) labels += batch.labels_BT.ne(kIgnored).sum().item<int64_t>();
  if (labels == 0) throw Error("no label of this training step counts", "all of them are marked as ignored (-100)");
  return labels;
}

}  // namespace

/// A step that was begun: what will be known of it.
struct Trainer::Pending {
  StepResult result;  ///< but for what `numbers` will say
  int64_t micro_batches = 0;
  std::vector<size_t> parameters;  ///< of the norms
  DeviceNumbers numbers;           ///< loss of each micro-batch, global norm, norm of each gradient
};

Trainer::Trainer(model::LanguageModel& model, const TrainerOptions& options)
    : model_(model), options_(options), optimizer_(model.parameters(), options.adamw) {
  model_.set_requires_grad(true);
}
Trainer::~Trainer() = default;
Trainer::Trainer(Trainer&&) noexcept = default;

int64_t Trainer::pending() const { return std::ssize(pending_); }

std::vector<at::Tensor> Trainer::backward(std::span<const data::Batch> micro_batches, Pending& pending) {
  const int64_t labels = count_labels(micro_batches);
  const bool whole = micro_batches.size() == 1;  // the model's own mean is then the mean over the step
  const auto& like = model_.parameters().front().tensor;
  std::vector<at::Tensor> losses;
  for (const auto& batch : micro_batches) {
    const auto ids_BT = batch.ids_BT.to(like.device(), /*non_blocking=*/true);
    const auto labels_BT = batch.labels_BT.to(like.device(), /*non_blocking=*/true);
    std::optional<at::Tensor> weight_BT;
    if (!whole) {
      weight_BT =
          at::full(labels_BT.sizes(), 1.0 / static_cast<double>(labels), labels_BT.options().dtype(like.scalar_type()));
    }
    try {
      const auto total = model_.loss(ids_BT, labels_BT, {}, weight_BT).total;
      losses.push_back(total.detach().to(at::kDouble));
      total.backward();
    } catch (const NonFiniteError& error) {
      pending.result.fault =
          fmt::format("in micro-batch {} of {}: {}", losses.size() + 1, micro_batches.size(), error.what());
      return {};
    }
  }
  return losses;
}

void Trainer::begin_step(std::span<const data::Batch> micro_batches) {
  Pending pending;
  pending.result.step = state_.step + std::ssize(pending_) + 1;
  pending.result.lr = options_.schedule.at(tokens_begun_);
  pending.result.tokens = tokens_begun_;
  for (const auto& batch : micro_batches) pending.result.tokens += batch.ids_BT.numel();
  pending.micro_batches = std::ssize(micro_batches);

  const auto& parameters = model_.parameters();
  for (const auto& parameter : parameters) parameter.tensor.mutable_grad().reset();
  auto losses = backward(micro_batches, pending);
  const auto device = parameters.front().tensor.device();
  if (!pending.result.fault.empty() && !device.is_cpu()) {
    // On a GPU a bad gate is reported by a later call than its own, which may have been the step before this one.
    at::accelerator::synchronizeDevice(device.index());
    pending.result.fault.clear();
    for (const auto& parameter : parameters) parameter.tensor.mutable_grad().reset();
    losses = backward(micro_batches, pending);
  }
  if (pending.result.fault.empty()) {
    const at::NoGradGuard no_grad;
    auto norms = gradient_norms(parameters);
    const auto numbers = at::cat({at::stack(losses), norms.global.view(1), norms.each});
    // The global norm is finite exactly when all gradients are.
    const auto apply = at::isfinite(numbers.narrow(0, 0, pending.micro_batches + 1)).all();
    optimizer_.step(pending.result.lr, {norms.divisor(options_.max_grad_norm), apply});
    pending.numbers = DeviceNumbers(numbers);
    pending.parameters = std::move(norms.parameters);
  }
  tokens_begun_ = pending.result.tokens;
  pending_.push_back(std::move(pending));
}

StepResult Trainer::finish_step() {
  if (pending_.empty()) throw Error("finish_step without a step begun");
  Pending pending = std::move(pending_.front());
  pending_.erase(pending_.begin());
  StepResult& result = pending.result;
  if (result.fault.empty()) {
    read_numbers(pending);
  } else {
    result.loss = result.grad_norm = std::nan("");
  }
  state_.bad_steps = result.fault.empty() ? 0 : state_.bad_steps + 1;
  state_.step = result.step;
  state_.tokens = result.tokens;
  return result;
}

void Trainer::read_numbers(Pending& pending) const {
  StepResult& result = pending.result;
  const std::vector<double> numbers = pending.numbers.read();
  for (int64_t i = 0; i < pending.micro_batches; ++i) {
    result.loss += numbers[i];
    if (std::isfinite(numbers[i])) continue;
    result.grad_norm = std::nan("");
    result.fault = fmt::format("the loss of micro-batch {} of {} is {}", i + 1, pending.micro_batches, numbers[i]);
    return;
  }
  result.grad_norm = numbers[pending.micro_batches];
  if (std::isfinite(result.grad_norm)) return;
  std::string culprit = "the gradient norm";
  for (size_t i = 0; i < pending.parameters.size(); ++i) {
    if (std::isfinite(numbers[pending.micro_batches + 1 + i])) continue;
    culprit = "the gradient of " + model_.parameters()[pending.parameters[i]].name;
    break;
  }
  result.fault = fmt::format("{} is not finite", culprit);
}

StepResult Trainer::step(std::span<const data::Batch> micro_batches) {
  if (!pending_.empty()) throw Error("step while another one is pending", "finish it first");
  begin_step(micro_batches);
  return finish_step();
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
    tokens_begun_ = state_.tokens;
    optimizer_.restore(tensors, state.at("optimizer_steps").get<int64_t>(), where);
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("{}: not the state of a trainer: {}", where, error.what()),
                "the checkpoint was written by another version, or changed since");
  }
}

}  // namespace fox::train
