#include "train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "checkpoint/hf_directory.h"
#include "nn/packed_weights.h"
#include "train/device_numbers.h"

namespace fox::train {
namespace {

constexpr int64_t kIgnored = -100;

int64_t count_labels(std::span<const data::Batch> micro_batches) {
  int64_t labels = 0;
  for (const auto& batch : micro_batches) labels += batch.labels_BT.ne(kIgnored).sum().item<int64_t>();
  return labels;
}

std::unique_ptr<ParameterBuckets> make_buckets(model::LanguageModel& model, const TrainerOptions& options,
                                               const dist::ProcessGroup& ranks) {
  model.set_requires_grad(true);
  if (ranks.size() == 1) return nullptr;
  return std::make_unique<ParameterBuckets>(model.parameters(), ranks, options.shard_optimizer, options.bucket_bytes);
}

}  // namespace

/// A step that was begun: what will be known of it.
struct Trainer::Pending {
  StepResult result;  ///< but for what `numbers` will say
  int64_t micro_batches = 0;
  std::vector<size_t> parameters;  ///< of the norms
  dist::Transfer sums;             ///< by which numbers come together
  DeviceNumbers numbers;  ///< loss of each micro-batch of each rank, ranks to stop, global norm, norm of each gradient
};

Trainer::Trainer(model::LanguageModel& model, const TrainerOptions& options, const dist::ProcessGroup& ranks,
                 std::shared_ptr<const dist::SequenceShard> shard)
    : model_(model),
      options_(options),
      ranks_(ranks),
      buckets_(make_buckets(model, options, ranks)),
      optimizer_(buckets_ ? buckets_->own() : model.parameters(), options.adamw, device()) {
  if (options.graph && !buckets_) graph_ = StepGraph::make(device());
  sequence_.shard = std::move(shard);
  broadcast_weights();
  counting_ = ranks_;
  if (!buckets_ || !buckets_->sharded()) return;
  // On a GPU what a group does is done in order: a step's labels would wait for all the weights of the step before.
  // (On CPUs they do: making another group there takes longer than it spares.)
  if (!device().is_cpu()) counting_ = ranks_.split(0, ranks_.rank());
  model_.set_before_weights([buckets = buckets_.get()](size_t n) { buckets->wait_for_weights(n); });
}
Trainer::~Trainer() {
  if (buckets_ && buckets_->sharded()) model_.set_before_weights([](size_t) {});
}
Trainer::Trainer(Trainer&&) noexcept = default;

void Trainer::broadcast_weights() {
  if (!buckets_) return;
  const at::NoGradGuard no_grad;
  for (const auto& parameter : model_.parameters()) {
    ranks_.broadcast(parameter.tensor.detach()).wait();
    nn::mark_changed(parameter.tensor);
  }
}

at::Device Trainer::device() const { return model_.parameters().front().tensor.device(); }

void Trainer::weights_changed() const {
  for (const auto& parameter : model_.parameters()) nn::mark_changed(parameter.tensor);
}

int64_t Trainer::pending() const { return std::ssize(pending_); }

std::optional<at::Tensor> Trainer::label_weight(std::span<const data::Batch> micro_batches) const {
  const auto& like = model_.parameters().front().tensor;
  const int64_t own = count_labels(micro_batches);
  if (ranks_.size() == 1) {
    if (own == 0) throw Error("no label of this training step counts", "all of them are marked as ignored (-100)");
    if (micro_batches.size() == 1) return std::nullopt;
  }
  const auto labels = at::full({}, own, like.options().dtype(at::kDouble).requires_grad(false));
  counting_.all_reduce(labels).wait();
  return labels.reciprocal().to(like.scalar_type());
}

void Trainer::forget_gradients(bool several_passes) {
  if (buckets_) return buckets_->begin_step(several_passes);
  for (const auto& parameter : model_.parameters()) parameter.tensor.mutable_grad().reset();
}

std::vector<at::Tensor> Trainer::backward(const StepInputs& inputs, Pending& pending) {
  forget_gradients(inputs.micro_batches.size() > 1);
  std::vector<at::Tensor> losses;
  const size_t count = inputs.micro_batches.size();
  for (const auto& batch : inputs.micro_batches) {
    std::optional<at::Tensor> weight_BT;
    if (inputs.label_weight) weight_BT = inputs.label_weight->expand(batch.labels_BT.sizes()).contiguous();
    if (buckets_ && losses.size() + 1 == count) buckets_->last_pass();
    try {
      const auto total = model_.loss(batch.ids_BT, batch.labels_BT, sequence_, weight_BT).total;
      losses.push_back(total.detach().to(at::kDouble));
      total.backward();
    } catch (const NonFiniteError& error) {
      pending.result.fault = fmt::format("in micro-batch {} of {}: {}", losses.size() + 1, count, error.what());
      break;
    }
  }
  if (!pending.result.fault.empty()) {
    losses.assign(count, at::full({}, std::nan(""), at::dtype(at::kDouble).device(device())));
  }
  return losses;
}

StepOutputs Trainer::compute(const StepInputs& inputs, Pending& pending) {
  auto losses = backward(inputs, pending);
  if (!pending.result.fault.empty() && !device().is_cpu()) {
    // On a GPU a bad gate is reported by a later call than its own, which may have been the step before this one.
    at::accelerator::synchronizeDevice(device().index());
    pending.result.fault.clear();
    losses = backward(inputs, pending);
  }
  if (buckets_) buckets_->finish_gradients(/*faulty=*/!pending.result.fault.empty());
  if (!buckets_ && !pending.result.fault.empty()) return {};
  return update(losses, inputs.lr, pending);
}

StepOutputs Trainer::run_graph(const StepInputs& inputs, const StepWork& work) {
  forget_gradients(false);  // whose memory would else be kept beside the graph's
  // Casts of weights (nn::PackedWeights) must be part of what is recorded, also when an evaluation has just made them.
  weights_changed();
  const auto [outputs, replayed] = graph_->run(inputs, work);
  if (replayed) weights_changed();  // of which nothing on the host was told
  return outputs;
}

void Trainer::begin_step(std::span<const data::Batch> micro_batches) {
  Pending pending;
  pending.result.step = state_.step + std::ssize(pending_) + 1;
  pending.result.lr = options_.schedule.at(tokens_begun_);
  pending.result.tokens = tokens_begun_;
  pending.result.stop = asked_to_stop_;
  for (const auto& batch : micro_batches) pending.result.tokens += ranks_.size() * batch.ids_BT.numel();
  pending.micro_batches = std::ssize(micro_batches);

  StepInputs inputs{{}, label_weight(micro_batches), optimizer_.device_lr(pending.result.lr)};
  for (const auto& batch : micro_batches) {
    inputs.micro_batches.push_back(
        {batch.ids_BT.to(device(), /*non_blocking=*/true), batch.labels_BT.to(device(), /*non_blocking=*/true)});
  }
  const StepWork work = [&](const StepInputs& in) { return compute(in, pending); };
  const auto outputs = graph_ ? run_graph(inputs, work) : work(inputs);
  if (outputs.numbers.defined()) pending.numbers = DeviceNumbers(outputs.numbers);
  pending.parameters = outputs.parameters;
  tokens_begun_ = pending.result.tokens;
  pending_.push_back(std::move(pending));
}

StepOutputs Trainer::update(const std::vector<at::Tensor>& losses, const at::Tensor& lr, Pending& pending) {
  const at::NoGradGuard no_grad;
  const auto& parameters = model_.parameters();
  const bool sharded = buckets_ && buckets_->sharded();
  const int64_t own = std::ssize(losses), all = own * ranks_.size();
  // Losses, ranks to stop and, when every rank has the gradients of its share only, squares of their norms.
  const auto sums = at::zeros({all + 1 + (sharded ? std::ssize(parameters) : 0)}, losses.front().options());
  const auto squares = sums.narrow(0, all + 1, sums.numel() - all - 1);
  sums.narrow(0, own * ranks_.rank(), own).copy_(at::stack(losses));
  sums[all].fill_(asked_to_stop_ ? 1 : 0);
  if (sharded && !buckets_->own().empty()) {
    squares.index_copy_(0, buckets_->own_indices(), gradient_norms(buckets_->own()).each.square());
  }
  pending.sums = ranks_.all_reduce(sums);
  dist::Transfer(pending.sums).wait();

  GradientNorms norms;
  if (sharded) {
    norms = {{}, squares.sqrt(), squares.sum().sqrt()};
    for (size_t i = 0; i < parameters.size(); ++i) norms.parameters.push_back(i);
  } else {
    norms = gradient_norms(parameters);
  }
  const auto numbers = at::cat({sums.narrow(0, 0, all + 1), norms.global.view(1), norms.each});
  // The global norm is finite exactly when all gradients are.
  const auto apply = at::isfinite(numbers.narrow(0, 0, all + 2)).all();
  optimizer_.step(lr, {norms.divisor(options_.max_grad_norm), apply});
  if (buckets_) buckets_->gather_weights();
  return {numbers, std::move(norms.parameters)};
}

StepResult Trainer::finish_step() {
  if (pending_.empty()) throw Error("finish_step without a step begun");
  Pending pending = std::move(pending_.front());
  pending_.erase(pending_.begin());
  StepResult& result = pending.result;
  const std::string told = result.fault;
  if (buckets_ || told.empty()) read_numbers(pending);
  if (graph_) {  // else a call of an evaluation would throw for what is told here
    const std::string report = graph_->take_report();
    if (!report.empty()) report_ = ": " + report;
    // It may be of the step after this one, which is then still to come.
    if (!result.fault.empty()) result.fault += std::exchange(report_, "");
  }
  if (!told.empty()) {
    result.fault = told;
    result.loss = result.grad_norm = std::nan("");
  }
  state_.bad_steps = result.fault.empty() ? 0 : state_.bad_steps + 1;
  state_.step = result.step;
  state_.tokens = result.tokens;
  if (buckets_ && pending_.empty()) buckets_->wait_for_weights(model_.parameters().size());  // whoever reads them now
  return result;
}

void Trainer::read_numbers(Pending& pending) const {
  StepResult& result = pending.result;
  pending.sums.wait_on_host();  // a rank that hangs is noticed here
  const std::vector<double> numbers = pending.numbers.read();
  const int64_t own = pending.micro_batches, all = own * ranks_.size();
  result.stop = result.stop || numbers[all] > 0;
  for (int64_t i = 0; i < all; ++i) {
    result.loss += numbers[i];
    if (std::isfinite(numbers[i])) continue;
    result.grad_norm = std::nan("");
    const std::string whose = ranks_.size() == 1 ? "" : fmt::format(" on rank {}", i / own);
    result.fault = fmt::format("the loss of micro-batch {} of {}{} is {}", i % own + 1, own, whose, numbers[i]);
    return;
  }
  result.grad_norm = numbers[all + 1];
  if (std::isfinite(result.grad_norm)) return;
  std::string culprit = "the gradient norm";
  for (size_t i = 0; i < pending.parameters.size(); ++i) {
    if (std::isfinite(numbers[all + 2 + i])) continue;
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

void Trainer::visit_tensors(const TensorSink& sink) const {
  const auto own = tensors();
  if (!buckets_) {
    for (const auto& [name, tensor] : own) sink(name, tensor);
    return;
  }
  for (const char* kind : AdamW::kMoments) buckets_->gather(own, kind, sink);
}

checkpoint::NamedTensors Trainer::shapes() const {
  checkpoint::NamedTensors shapes;
  for (const auto& parameter : model_.parameters()) {
    if (!parameter.trainable) continue;
    const auto one = at::empty({}, parameter.tensor.options().requires_grad(false));
    for (const char* kind : AdamW::kMoments) shapes[kind + parameter.name] = one.expand(parameter.tensor.sizes());
  }
  return shapes;
}

void Trainer::restore(const nlohmann::json& state, const checkpoint::NamedTensors& tensors, const std::string& where) {
  try {
    state_ = {state.at("step").get<int64_t>(), state.at("tokens").get<int64_t>(), state.at("bad_steps").get<int64_t>()};
    tokens_begun_ = state_.tokens;
    const auto steps = state.at("optimizer_steps").get<int64_t>();
    if (!buckets_) return optimizer_.restore(tensors, steps, where);
    optimizer_.set_steps(steps);
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("{}: not the state of a trainer: {}", where, error.what()),
                "the checkpoint was written by another version, or changed since");
  }
  const at::NoGradGuard no_grad;
  checkpoint::NamedTensors whole;
  if (ranks_.rank() == 0) {
    for (const auto& [name, shape] : shapes()) whole[name] = at::empty(shape.sizes(), shape.dtype());
    checkpoint::load_into(tensors, whole, where);
  }
  for (const char* kind : AdamW::kMoments) buckets_->scatter(whole, kind, optimizer_.state());
  broadcast_weights();
}

}  // namespace fox::train
