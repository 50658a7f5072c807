#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "data/batch_stream.h"
#include "dist/process_group.h"
#include "model/language_model.h"
#include "train/optimizer.h"
#include "train/parameter_buckets.h"
#include "train/schedule.h"
#include "train/step_graph.h"

namespace fox::train {

struct TrainerOptions {
  Schedule schedule;
  AdamWOptions adamw;
  double max_grad_norm = 1.0;
  bool shard_optimizer = true;  ///< among ranks, each updates its share of the parameters (ParameterBuckets)
  /// Of gradients that travel together: enough for the links to be busy with, little enough that most is sent while the
  /// backward pass goes on.
  int64_t bucket_bytes = int64_t{32} << 20;
  /// On a GPU, of one rank: steps are recorded and repeated (StepGraph), which spares small models the host's launches.
  bool graph = false;
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
  bool stop = false;  ///< some rank had been asked to stop when it began this step
  std::string fault;  ///< why the step was not applied (names the micro-batch or the parameter), or "" when it was
};

/// One optimizer step after another on batches that it is given; knows no files. Everything that decides the next step
/// is in the model's parameters and in state() and tensors(), so that a trainer restored from them goes on bit for bit
/// (on as many threads and ranks).
///
/// Several ranks train one model together: each has a trainer and a model of the same shape and calls the same
/// functions in the same order, giving its own part of each step's batch. Losses, gradients and what is finite are
/// those of the whole step, and all end it with the same weights. How many ranks there are makes no other difference
/// than that of the order in which gradients are added.
class Trainer {
 public:
  /// Trains the parameters `model` has now, in place: set its device and dtypes before. Among `ranks`, everybody's
  /// gradients add up, and the weights to begin with are those of rank 0. With `shard`, of some of these ranks, batches
  /// are this one's part of sequences that they hold together.
  Trainer(model::LanguageModel& model, const TrainerOptions& options, const dist::ProcessGroup& ranks = {},
          std::shared_ptr<const dist::SequenceShard> shard = nullptr);
  ~Trainer();
  Trainer(Trainer&&) noexcept;

  /// One step. Gradients of the micro-batches add up to the gradient of the mean loss over all labels of the step, so
  /// that how a step is cut makes no difference. When a loss or the gradient norm is not finite, neither parameters nor
  /// moments change, but step and tokens go on: the data that did it is not met again. Each rank gives as many
  /// micro-batches and tokens as the others.
  /// Throws fox::Error when no label of the step counts (among ranks, that is a loss which is not finite).
  StepResult step(std::span<const data::Batch> micro_batches);

  /// The same in two halves, so that a GPU need not wait for the host: begin_step queues a whole step and returns (on a
  /// GPU before it is done); finish_step waits for the oldest one begun and says what came of it. What is not finite is
  /// kept out by the device itself, also in steps begun before that is known here. Batches on the host are copied to
  /// the model's device.
  void begin_step(std::span<const data::Batch> micro_batches);
  StepResult finish_step();
  /// Steps begun and not finished.
  int64_t pending() const;
  /// Lets all ranks know by the next step begun (StepResult::stop) that this one was asked to stop.
  void ask_to_stop() { asked_to_stop_ = true; }

  /// Whether steps are recorded and repeated.
  bool repeats_steps() const { return graph_ != nullptr; }
  /// Where the finished steps have led to.
  const TrainerState& state() const { return state_; }
  /// Tokens read by all steps begun.
  int64_t tokens_begun() const { return tokens_begun_; }

  /// {"step", "tokens", "bad_steps", "optimizer_steps"}. This and tensors() are the state between two steps only while
  /// none is pending.
  nlohmann::json state_json() const;
  /// The optimizer's moments by name; the parameters are the model's. Sharded, what this rank holds of them.
  checkpoint::NamedTensors tensors() const { return optimizer_.state(); }
  /// Whole moments one after the other, from all ranks, who all call this.
  void visit_tensors(const TensorSink& sink) const;
  /// Tensors by the names and in the shapes that visit_tensors() gives, without memory of their own.
  checkpoint::NamedTensors shapes() const;
  /// Takes over what state_json() and visit_tensors() gave, whatever the number of ranks then and now; `where` names
  /// their source in errors. Among ranks, all give the state and rank 0 alone the tensors; its weights go to all.
  void restore(const nlohmann::json& state, const checkpoint::NamedTensors& tensors, const std::string& where);

 private:
  struct Pending;
  at::Device device() const;
  /// Tells those who ask by its version whether a weight has changed (nn::PackedWeights).
  void weights_changed() const;
  void broadcast_weights();
  /// 1 / labels of the whole step, a scalar on the device; nothing when a lone micro-batch's own mean is that over all.
  std::optional<at::Tensor> label_weight(std::span<const data::Batch> micro_batches) const;
  void forget_gradients(bool several_passes);
  /// Losses of the micro-batches, on the device; sets pending.fault when the host knows of one.
  std::vector<at::Tensor> backward(const StepInputs& inputs, Pending& pending);
  /// What all ranks know of the step, from these losses and the gradients; then the optimizer's step.
  StepOutputs update(const std::vector<at::Tensor>& losses, const at::Tensor& lr, Pending& pending);
  /// The step's whole work on the device.
  StepOutputs compute(const StepInputs& inputs, Pending& pending);
  StepOutputs run_graph(const StepInputs& inputs, const StepWork& work);
  void read_numbers(Pending& pending) const;

  model::LanguageModel& model_;
  TrainerOptions options_;
  dist::ProcessGroup ranks_;
  dist::ProcessGroup counting_;                ///< the same ranks, for numbers that must not wait behind weights
  nn::Sequence sequence_;                      ///< of every batch
  std::unique_ptr<ParameterBuckets> buckets_;  ///< nothing when alone
  AdamW optimizer_;
  std::unique_ptr<StepGraph> graph_;  ///< nothing when steps are not repeated
  std::string report_;                ///< of a fault in a step still to be finished
  TrainerState state_;
  int64_t tokens_begun_ = 0;
  bool asked_to_stop_ = false;
  std::vector<Pending> pending_;  ///< oldest first
};

}  // namespace fox::train
