#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "config/run_config.h"
#include "model/language_model.h"
#include "train/trainer.h"

namespace fox::train {

// What a training run and its dry run set up alike.

/// Sets the number of threads of ATen and of the kernels (0: all cores, or an equal share of them when as many
/// processes as `sharing` run on this machine).
void set_threads(int64_t threads, int64_t sharing = 1);

/// The model to train: weights of `init_from` or of the published initialisation, on config.train.device, parameters
/// and activations in the dtypes of config.train.precision: "float32", "float64", or "bf16" (activations in bfloat16;
/// parameters, gradients and moments in float32).
model::LanguageModel make_model(const RunConfig& config, const std::optional<std::filesystem::path>& init_from);

/// Puts `model` on a device and sets the dtypes of its parameters and activations (`precision` as above) and what it
/// computes again in the backward pass (train.activation_checkpointing).
void place_model(model::LanguageModel& model, at::Device device, const std::string& precision,
                 const std::string& activation_checkpointing);

/// Whether steps are to be repeated as a CUDA graph (train.cuda_graph): "auto" does where launching a forward and
/// backward pass of `tokens` in contexts of `context` takes the host nearly as long as computing them takes a GPU. A
/// larger model gains nothing and would keep the memory of its activations while it evaluates.
bool repeats_steps(const std::string& cuda_graph, const model::LanguageModel& model, int64_t context, int64_t tokens);

/// Tells standard error when train.cuda_graph = "on" has no effect: on a CPU, and among several ranks.
void warn_of_idle_graph(const std::string& cuda_graph, at::Device device, int ranks);

TrainerOptions trainer_options(const RunConfig& config, const model::LanguageModel& model);

/// Steps until max_tokens are read.
int64_t total_steps(const TrainConfig& config);

}  // namespace fox::train
