#include "train/step_graph.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace fox::train {
namespace {

std::vector<at::Tensor> tensors_of(const StepInputs& inputs) {
  std::vector<at::Tensor> tensors{inputs.lr};
  if (inputs.label_weight) tensors.push_back(*inputs.label_weight);
  for (const auto& batch : inputs.micro_batches) {
    tensors.push_back(batch.ids_BT);
    tensors.push_back(batch.labels_BT);
  }
  return tensors;
}

}  // namespace

std::unique_ptr<StepGraph> StepGraph::make(at::Device device) {
  auto graph = ops::DeviceGraph::make(device);
  return graph ? std::make_unique<StepGraph>(std::move(graph)) : nullptr;
}

bool StepGraph::fits(const StepInputs& inputs) const {
  if (inputs.label_weight.has_value() != inputs_->label_weight.has_value()) return false;
  const auto theirs = tensors_of(inputs), ours = tensors_of(*inputs_);
  if (theirs.size() != ours.size()) return false;
  for (size_t i = 0; i < ours.size(); ++i) {
    if (theirs[i].sizes() != ours[i].sizes()) return false;
  }
  return true;
}

void StepGraph::fill(const StepInputs& inputs) {
  const at::NoGradGuard no_grad;
  if (!inputs_) {
    inputs_ = inputs;
    for (auto& batch : inputs_->micro_batches) batch = {batch.ids_BT.clone(), batch.labels_BT.clone()};
    if (inputs_->label_weight) inputs_->label_weight = inputs_->label_weight->clone();
    inputs_->lr = inputs_->lr.clone();
    return;
  }
  const auto theirs = tensors_of(inputs), ours = tensors_of(*inputs_);
  for (size_t i = 0; i < ours.size(); ++i) ours[i].copy_(theirs[i]);
}

StepGraph::Done StepGraph::run(const StepInputs& inputs, const StepWork& work) {
  if (inputs_ && !fits(inputs)) return {work(inputs), false};
  fill(inputs);
  const auto do_work = [&] { outputs_ = work(*inputs_); };
  if (steps_++ < kStepsBefore) {
    graph_->run(do_work);
    return {outputs_, false};
  }
  if (!graph_->recorded()) graph_->record(do_work);
  graph_->replay();
  return {outputs_, true};
}

}  // namespace fox::train
