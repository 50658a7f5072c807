#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>

#include "checkpoint/safetensors.h"
#include "data/batch_stream.h"
#include "model/language_model.h"
#include "train/optimizer.h"
#include "train/schedule.h"

namespace fox::train {

struct TrainerOptions {
  Schedule schedule;
  AdamWOptions adamw;
  double max_grad_norm = 1.0;
};

/// How far training has come.
struct TrainerState {
  int64_t step = 0;       ///< steps done, those that were not applied included
  int64_t tokens = 0;     ///< tokens read, which is also the position in the data
  int64_t bad_steps = 0;  ///< consecutive steps before this point that were not applied
};

struct StepResult {
  int64_t step = 0;      ///< number of this step, from 1
  int64_t tokens = 0;    ///< tokens read, this step included
  double loss = 0;       ///< mean nats over all labels of the step that count
  double grad_norm = 0;  ///< global L2 norm before clipping
  double lr = 0;
  std::string fault;  ///< why the step was not applied (names the micro-batch or the parameter), or "" when it was
};

/// One optimizer step after another on batches that it is given; knows no files. Everything that decides the next step
/// is in the model's parameters and in state() and tensors(), so that a trainer restored from them goes on bit for bit
/// (on as many threads).
class Trainer {
 public:
  /// Trains the parameters `model` has now, in place: set its device and dtypes before.
  Trainer(model::LanguageModel& model, const TrainerOptions& options);

  /// One step. Gradients of the micro-batches add up to the gradient of the mean loss over all labels of the step, so
  /// that how a step is cut makes no difference. When a loss or the gradient norm is not finite, neither parameters nor
  /// moments change, but step and tokens go on: the data that did it is not met again.
  /// Throws fox::Error when no label of the step counts.
  StepResult step(std::span<const data::Batch> micro_batches);

  const TrainerState& state() const { return state_; }

  /// {"step", "tokens", "bad_steps", "optimizer_steps"}.
  nlohmann::json state_json() const;
  /// The optimizer's moments by name; the parameters are the model's.
  checkpoint::NamedTensors tensors() const { return optimizer_.state(); }
  /// Takes over what state_json() and tensors() gave; `where` names their source in errors.
  void restore(const nlohmann::json& state, const checkpoint::NamedTensors& tensors, const std::string& where);

 private:
  double backward(std::span<const data::Batch> micro_batches, StepResult& result);

  model::LanguageModel& model_;
  TrainerOptions options_;
  AdamW optimizer_;
  TrainerState state_;
};

}  // namespace fox::train
