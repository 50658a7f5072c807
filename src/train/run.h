#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>

#include "config/run_config.h"
#include "dist/launch.h"
#include "train/trainer.h"

namespace fox::train {

struct RunOptions {
  /// This process's place among those that train together (dist::read_launch), each of which calls run_training.
  dist::Launch launch = {};
  /// A Hugging Face directory (or run) whose weights to start from instead of random ones.
  std::optional<std::filesystem::path> init_from;
  /// Called, on rank 0, with every setting filled in, once nothing that a user could have done wrong stands in the way.
  std::function<void(const RunConfig&)> on_begin;
  /// Called after each step, and as a checkpoint is written (CheckpointStoreOptions::on_stage): tests look on, and stop
  /// the process there.
  std::function<void(const StepResult&)> on_step;
  std::function<void(std::string_view stage)> on_checkpoint_stage;
};

enum class RunOutcome {
  kFinished,         ///< trained to max_tokens
  kAlreadyFinished,  ///< an earlier call had; nothing was done
  kInterrupted,      ///< Ctrl-C: a checkpoint was saved, the same call continues
};

/// Trains as `config` says in config.output.dir, from the newest complete checkpoint there if there is one. A run that
/// was stopped at any moment, by whatever, and called again goes on bit for bit as if it had not been (on as many
/// threads and ranks; on a GPU with train.deterministic). Throws fox::Error for bad input (each names it), when the
/// disk fills up, after max_bad_steps consecutive steps whose loss or gradient was not finite, and when another rank
/// ends or hangs (its name is told); what is written then stays good. Ranks share the folder; rank 0 alone writes
/// there, but for a line each to standard error.
RunOutcome run_training(RunConfig config, const RunOptions& options = {});

}  // namespace fox::train
