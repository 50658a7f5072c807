#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "base/event_file.h"
#include "base/progress.h"
#include "config/run_config.h"
#include "eval/gates.h"
#include "eval/per_token_loss.h"
#include "train/metrics.h"
#include "train/trainer.h"

namespace fox::train {

/// What a run shows and writes down as it goes: the progress bar, metrics.jsonl, TensorBoard's events. One process of a
/// run has one.
class RunLog {
 public:
  /// Continues or starts the files in the run's folder. `start`: the state that training goes on from.
  RunLog(const RunConfig& config, const TrainerState& start);

  /// A line of its own above the progress bar.
  void message(const std::string& line) { progress_.message(line); }
  /// Moves the bar, and complains of a step that was not applied.
  void show(const StepResult& result);
  /// Of a line of metrics; `data_wait` is the share of the time in which no batch was ready.
  void write_step(const StepResult& result, double tokens_per_s, double data_wait);
  void write_evaluation(const TrainerState& state, const eval::HeldOutLoss& held_out);
  void write_gates(const TrainerState& state, const eval::GateAnalysis& gates);
  void write_sample(const TrainerState& state, const std::string& text);
  /// The lines so far are on the disk when this returns.
  void sync() { metrics_.sync(); }
  void finish() { progress_.finish(); }

 private:
  int64_t batch_tokens_, context_;
  MetricsLog metrics_;
  std::unique_ptr<EventFile> events_;  ///< nothing when output.tensorboard is off
  Progress progress_;
};

}  // namespace fox::train
