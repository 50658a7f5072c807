#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

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
  ~Trainer();
  Trainer(Trainer&&) noexcept;

  /// One step. Gradients of the micro-batches add up to the gradient of the mean loss over all labels of the step, so
  /// that how a step is cut makes no difference. When a loss or the gradient norm is not finite, neither parameters nor
  /// moments change, but step and tokens go on: the data that did it is not met again.
  /// Throws fox::Error when no label of the step counts.
  StepResult step(std::span<const data::Batch> micro_batches);

  /// The same in two halves, so that a GPU need not wait for the host: begin_step queues a whole step and returns (on a
  /// GPU before it is done); finish_step waits for the oldest one begun and says what came of it. What is not finite is
  /// kept out by the device itself, also in steps begun before that is known here. Batches on the host are copied to
  /// the model's device.
  void begin_step(std::span<const data::Batch> micro_batches);
  StepResult finish_step();
  /// Steps begun and not finished.
  int64_t pending() const;

  /// Where the finished steps have led to.
  const TrainerState& state() const { return state_; }
  /// Tokens read by all steps begun.
  int64_t tokens_begun() const { return tokens_begun_; }

  /// {"step", "tokens", "bad_steps", "optimizer_steps"}. This and tensors() are the state between two steps only while
  /// none is pending.
  nlohmann::json state_json() const;
  /// The optimizer's moments by name; the parameters are the model's.
  checkpoint::NamedTensors tensors() const { return optimizer_.state(); }
  /// Takes over what state_json() and tensors() gave; `where` names their source in errors.
  void restore(const nlohmann::json& state, const checkpoint::NamedTensors& tensors, const std::string& where);

 private:
  struct Pending;
  /// Losses of the micro-batches, on the device; sets pending.fault when the host knows of one.
  std::vector<at::Tensor> backward(std::span<const data::Batch> micro_batches, Pending& pending);
  void read_numbers(Pending& pending) const;

  model::LanguageModel& model_;
  TrainerOptions options_;
  AdamW optimizer_;
  TrainerState state_;
  int64_t tokens_begun_ = 0;
  std::vector<Pending> pending_;  ///< oldest first
};

}  // namespace fox::train
