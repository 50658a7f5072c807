#pragma once

#include <filesystem>
#include <optional>

#include "config/run_config.h"
#include "model/language_model.h"
#include "train/trainer.h"

namespace fox::train {

// What a training run and its dry run set up alike.

/// Sets the number of threads of ATen and of the kernels (0: all cores).
void set_threads(int64_t threads);

/// Weights from a Hugging Face directory or a run (its newest checkpoint), which must fit `model`.
void load_weights(model::LanguageModel& model, const std::filesystem::path& dir);

/// The model to train: weights of `init_from` or of the published initialisation, on config.train.device, parameters
/// and activations in the dtypes of config.train.precision: "float32", "float64", or "bf16" (activations in bfloat16;
/// parameters, gradients and moments in float32).
model::LanguageModel make_model(const RunConfig& config, const std::optional<std::filesystem::path>& init_from);

TrainerOptions trainer_options(const TrainConfig& config);

/// Steps until max_tokens are read.
int64_t total_steps(const TrainConfig& config);

}  // namespace fox::train
