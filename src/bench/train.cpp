#include "bench/train.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "bench/inputs.h"
#include "bench/step_profile.h"
#include "bench/timing.h"
#include "config/published_models.h"
#include "model/language_model.h"
#include "ops/device.h"
#include "train/prefetch.h"
#include "train/ranks.h"
#include "train/setup.h"
#include "train/trainer.h"

namespace fox::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kPeakFlops = 989e12;          // dense bf16 of H100 and H200 SXM
constexpr int64_t kProfiled = 2;               // steps
constexpr std::chrono::seconds kTimeout{300};  // of a rank that is waited for

ModelConfig model_config(const TrainOptions& x) {
  if (x.gates != "dense" && x.gates != "log_spaced") {
    throw UsageError(fmt::format("unknown gates '{}'", x.gates), "known: dense, log_spaced");
  }
  ModelConfig config = published_model(x.model, x.size);
  const bool gated = config.kind() == "forgetting_transformer" && config.fgate_type == GateType::kFull;
  if (!gated && (x.gates != "dense" || x.prune)) {
    throw UsageError(fmt::format("{} has no forget gates to set or to prune by", x.model),
                     "leave --gates and --prune out");
  }
  if (x.gates == "log_spaced") {
    config.fgate_bias_init = true;
    config.decay_time_min = kShortestDecay;
    config.decay_time_max = kLongestDecay;
  }
  if (x.prune) config.log_pruning_tolerance = kLogPruningTolerance;
  return config;
}

using Shard = std::shared_ptr<const dist::SequenceShard>;

/// Random tokens, a batch a number, other ones on each rank, or a part of the same ones on those that share a `shard`.
train::Prefetcher::Source random_batches(const TrainOptions& x, int64_t vocab, const Shard& shard) {
  return [=](int64_t index) {
    const auto number = static_cast<uint64_t>((index * x.launch.size + x.launch.rank) / x.sequence_ranks);
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(x.seed + number);
    const auto draw = [&] { return at::randint(0, vocab, {x.batch, x.length}, generator, at::kLong); };
    return shard ? data::Batch{shard->take(draw()), shard->take(draw())} : data::Batch{draw(), draw()};
  };
}

/// A trainer that is fed; on a GPU one step is begun before the one before it is looked at, as in a run.
class Steps {
 public:
  Steps(const TrainOptions& x, model::LanguageModel& model, at::Device device, const dist::ProcessGroup& ranks,
        const Shard& shard)
      : options_(x),
        trainer_(model,
                 {.schedule = {.peak = 1e-5, .minimum = 1e-5},
                  .adamw = {},
                  .max_grad_norm = 1,
                  .graph = train::repeats_steps(x.cuda_graph, model, x.length, x.batch * x.length)},
                 ranks, shard),
        batches_(random_batches(x, model.config().vocab_size, shard), 0, 2 * x.micro_batches, !device.is_cpu()),
        lag_(device.is_cpu() ? 0 : 1) {}

  /// Milliseconds from one finished step to the next.
  std::vector<double> run(int64_t count) {
    std::vector<double> ms;
    auto before = Clock::now();
    const auto finish = [&] {
      const auto result = trainer_.finish_step();
      if (!result.fault.empty()) throw Error(fmt::format("step {}: {}", result.step, result.fault));
      ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - before).count());
      before = Clock::now();
    };
    for (int64_t i = 0; i < count; ++i) {
      std::vector<data::Batch> batches;
      for (int64_t k = 0; k < options_.micro_batches; ++k) batches.push_back(batches_.next());
      trainer_.begin_step(batches);
      if (trainer_.pending() > lag_) finish();
    }
    while (trainer_.pending() > 0) finish();
    return ms;
  }
  bool repeats() const { return trainer_.repeats_steps(); }
  double waited_ms() const { return batches_.waited() * 1e3; }

 private:
  const TrainOptions& options_;
  train::Trainer trainer_;
  train::Prefetcher batches_;
  int64_t lag_;
};

double peak_gib(at::Device device) {
  constexpr double kGib = 1 << 30;
  if (!device.is_cpu()) {
    return static_cast<double>(at::accelerator::getDeviceStats(device.index()).allocated_bytes[0].peak) / kGib;
  }
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024 / kGib;
}

TrainMeasurement measurement_of(const TrainOptions& x) {
  return {.model = x.model,
          .size = x.size,
          .gates = x.prune ? "pruned" : "dense",
          .log_spaced = x.gates == "log_spaced",
          .T = x.length,
          .B = x.batch,
          .micro_batches = x.micro_batches,
          .ranks = x.launch.size,
          .sequence_ranks = x.sequence_ranks,
          .precision = x.precision,
          .device = x.device,
          .activation_checkpointing = x.activation_checkpointing};
}

}  // namespace

TrainMeasurement bench_train(const TrainOptions& options) {
  TrainOptions x = options;
  const auto& sizes = published_sizes();
  if (std::find(sizes.begin(), sizes.end(), x.model) != sizes.end()) {
    x.size = x.model;
    x.model = "fox_pro";
  }
  train::check_sequence_ranks(x.sequence_ranks, x.launch.size);
  train::set_threads(x.threads, x.launch.local_size);
  train::choose_device(x.device, x.launch);
  const auto device = ops::open_device(x.device);
  const auto ranks = dist::ProcessGroup::join(x.launch, device, kTimeout);
  model::LanguageModel model(model_config(x));
  // Weights are drawn where they are needed: on the host, 760 M of them take longer than the measurement.
  train::place_model(model, device, x.precision, x.activation_checkpointing);
  if (ranks.rank() == 0) train::warn_of_idle_graph(x.cuda_graph, device, ranks.size());
  model.init(x.seed);

  TrainMeasurement m = measurement_of(x);
  Steps steps(x, model, device, ranks, train::split_sequences(x.sequence_ranks, ranks));
  m.cuda_graph = steps.repeats();
  steps.run(std::max<int64_t>(x.warm_up, m.cuda_graph ? train::StepGraph::kStepsBefore + 1 : 0));
  const double waited_before = steps.waited_ms();
  const auto ms = steps.run(x.steps);
  const double waited = (steps.waited_ms() - waited_before) / static_cast<double>(x.steps);
  const Summary of_steps = summarise(ms);
  m.ms = of_steps.median, m.ms_spread = of_steps.spread;
  const int64_t rows = x.batch * x.micro_batches * ranks.size() / x.sequence_ranks;  // of all ranks
  const auto tokens = static_cast<double>(x.length * rows);
  m.tokens_per_s = tokens / m.ms * 1e3;
  if (!device.is_cpu()) m.mfu = 3 * model.flops_per_token(x.length) * m.tokens_per_s / (kPeakFlops * ranks.size());
  m.peak_gib = peak_gib(device);

  const int64_t profiled = std::min(kProfiled, x.steps);
  const auto profile = profile_steps(
      device, profiled, [&] { steps.run(profiled); }, x.trace);
  m.parts = profile.parts;
  m.kernels = profile.kernels;
  if (device.is_cpu()) m.parts["data"] = waited;  // a GPU's is that of its copies
  double busy = 0;
  for (const auto& [part, part_ms] : m.parts) busy += part_ms;
  m.parts["idle"] = std::max(0.0, m.ms - busy);
  return m;
}

std::string to_json(const TrainMeasurement& m) {
  return nlohmann::ordered_json{{"model", m.model},
                                {"size", m.size},
                                {"gates", m.gates},
                                {"log_spaced", m.log_spaced},
                                {"T", m.T},
                                {"B", m.B},
                                {"micro_batches", m.micro_batches},
                                {"ranks", m.ranks},
                                {"sequence_ranks", m.sequence_ranks},
                                {"precision", m.precision},
                                {"activation_checkpointing", m.activation_checkpointing},
                                {"cuda_graph", m.cuda_graph},
                                {"device", m.device},
                                {"tokens_per_s", m.tokens_per_s},
                                {"ms", m.ms},
                                {"ms_spread", m.ms_spread},
                                {"mfu", m.mfu},
                                {"parts", m.parts},
                                {"peak_gib", m.peak_gib}}
      .dump();
}

std::string describe(const TrainMeasurement& m) {
  std::string text = fmt::format(
      "{} {}, {} gates, T {} x B {} x {}, {} rank{}: {:.0f} tokens/s, {:.2f} ms a step (spread {:.2f})", m.model,
      m.size, m.gates, m.T, m.B, m.micro_batches, m.ranks, m.ranks == 1 ? "" : "s", m.tokens_per_s, m.ms, m.ms_spread);
  if (m.mfu > 0) text += fmt::format(", {:.1f} % of 989 TFLOP/s", 100 * m.mfu);
  text += fmt::format(", {:.2f} GiB\n", m.peak_gib);
  for (const auto& [part, ms] : m.parts)
    text += fmt::format("  {:<14} {:>9.3f} ms {:>5.1f} %\n", part, ms, 100 * ms / m.ms);
  std::vector<std::pair<double, std::string>> kernels;
  for (const auto& [name, ms] : m.kernels) kernels.emplace_back(ms, name);
  std::sort(kernels.rbegin(), kernels.rend());
  kernels.resize(std::min<size_t>(kernels.size(), 40));
  for (const auto& [ms, name] : kernels) {
    text += fmt::format("    {:>9.3f} ms  {:<13} {:.110}\n", ms, part_of(name), name);
  }
  return text;
}

}  // namespace fox::bench
