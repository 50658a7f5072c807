#include "train/setup.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <thread>

#include "base/error.h"
#include "infer/load_model.h"
#include "ops/device.h"

namespace fox::train {

void set_threads(int64_t threads, int64_t sharing) {
  const auto cores = static_cast<int64_t>(std::thread::hardware_concurrency());
  at::set_num_threads(static_cast<int>(threads > 0 ? threads : std::max(int64_t{1}, cores / sharing)));
}

model::LanguageModel make_model(const RunConfig& config, const std::optional<std::filesystem::path>& init_from) {
  const at::Device device =
      ops::open_device(config.train.device);  // an unknown one is told before anything is computed
  model::LanguageModel model(config.model);
  if (init_from) {
    infer::load_weights(model, infer::locate_model(*init_from).dir);
  } else {
    model.init(config.train.seed);
  }
  place_model(model, device, config.train.precision, config.train.activation_checkpointing);
  model.set_deterministic(config.train.deterministic);
  return model;
}

void place_model(model::LanguageModel& model, at::Device device, const std::string& precision,
                 const std::string& activation_checkpointing) {
  model.to(device, precision == "float64" ? at::kDouble : at::kFloat);
  if (precision == "bf16") model.set_compute_dtype(at::kBFloat16);
  using model::Recompute;
  const std::map<std::string, Recompute> recompute{
      {"none", Recompute::kNone}, {"mlp", Recompute::kMlp}, {"full", Recompute::kFull}};
  const auto found = recompute.find(activation_checkpointing);
  if (found == recompute.end()) {
    throw UsageError("unknown activation checkpointing '" + activation_checkpointing + "'", "known: none, mlp, full");
  }
  model.set_recompute(found->second);
}

bool repeats_steps(const std::string& cuda_graph, const model::LanguageModel& model, int64_t context, int64_t tokens) {
  if (cuda_graph != "auto") return cuda_graph == "on";
  // One H200: 1.4 to 2 ms a layer (docs/training.md); FLOP/s that a whole step reaches.
  constexpr double kLaunchSeconds = 1.4e-3, kFlops = 4e14;
  const double launching = kLaunchSeconds * static_cast<double>(model.config().num_hidden_layers);
  const double computing = 3 * model.flops_per_token(context) * static_cast<double>(tokens) / kFlops;
  return computing < 2 * launching;
}

void warn_of_idle_graph(const std::string& cuda_graph, at::Device device, int ranks) {
  if (cuda_graph != "on" || (device.is_cuda() && ranks == 1)) return;
  fmt::print(stderr, "warning: cuda_graph = \"on\" has no effect {}: one GPU alone repeats steps as a CUDA graph\n",
             device.is_cuda() ? "among several ranks" : "on a CPU");
}

TrainerOptions trainer_options(const RunConfig& config, const model::LanguageModel& model) {
  const TrainConfig& x = config.train;
  return {.schedule = {x.lr, x.min_lr, x.warmup_tokens, x.max_tokens},
          .adamw = {x.beta1, x.beta2, x.eps, x.weight_decay},
          .max_grad_norm = x.max_grad_norm,
          .shard_optimizer = x.shard_optimizer,
          .graph = repeats_steps(x.cuda_graph, model, config.data.context, x.micro_batch_tokens)};
}

int64_t total_steps(const TrainConfig& config) {
  return (config.max_tokens + config.batch_tokens - 1) / config.batch_tokens;
}

}  // namespace fox::train
