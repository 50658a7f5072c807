#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "config/run_config.h"

namespace fox::train {

/// What a run would take, measured by a few of its steps.
struct DryRun {
  int64_t parameters = 0;
  int64_t train_bytes = 0, valid_bytes = 0;  ///< of text
  int64_t steps = 0, step_tokens = 0;
  double tokens_per_s = 0;
  double seconds = 0;            ///< all steps; evaluations, samples and checkpoints come on top
  double flops_per_token = 0;    ///< forward and backward, three times the forward pass
  int64_t state_bytes = 0;       ///< weights, gradients and moments
  int64_t peak_bytes = 0;        ///< the most memory that this process held, activations and libraries included
  int64_t checkpoint_bytes = 0;  ///< of one checkpoint on disk
};

/// Checks all that run_training would check before it starts, builds the model, and times some steps on random tokens
/// of the right shape. Writes nothing. Throws what run_training would throw.
DryRun dry_run(RunConfig config, const std::optional<std::filesystem::path>& init_from = {});

/// Some lines for a reader.
std::string describe(const DryRun& result);

}  // namespace fox::train
