#include "train/dry_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "base/progress.h"
#include "train/corpora.h"
#include "train/setup.h"
#include "train/trainer.h"

namespace fox::train {
namespace {

constexpr int kFewestSteps = 3, kMostSteps = 50;
constexpr double kSeconds = 4;  // enough for the clock and the caches, short enough to wait for

std::vector<data::Batch> random_step(const RunConfig& config) {
  const int64_t context = config.data.context;
  const int64_t rows = config.train.micro_batch_tokens / context;
  const auto draw = [&] { return at::randint(0, config.model.vocab_size, {rows, context}, at::kLong); };
  std::vector<data::Batch> batches;
  for (int64_t done = 0; done < config.train.batch_tokens; done += rows * context) batches.push_back({draw(), draw()});
  return batches;
}

double median_step_seconds(Trainer& trainer, const std::vector<data::Batch>& batches) {
  using Clock = std::chrono::steady_clock;
  trainer.step(batches);  // pays for memory and look-ups once
  std::vector<double> seconds;
  const auto start = Clock::now();
  while (std::ssize(seconds) < kMostSteps) {
    const auto before = Clock::now();
    trainer.step(batches);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - before).count());
    if (std::ssize(seconds) >= kFewestSteps && Clock::now() - start > std::chrono::duration<double>(kSeconds)) break;
  }
  std::nth_element(seconds.begin(), seconds.begin() + std::ssize(seconds) / 2, seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

DryRun dry_run(RunConfig config, const std::optional<std::filesystem::path>& init_from) {
  set_threads(config.train.threads);
  const CorpusFiles files = find_corpus_files(config.data);
  fit_vocabulary(config.model, make_tokenizer(config.data));
  model::LanguageModel model = make_model(config, init_from);
  warn_of_idle_graph(config.train.cuda_graph, model.parameters().front().tensor.device(), /*ranks=*/1);
  Trainer trainer(model, trainer_options(config, model));

  DryRun result;
  result.parameters = model.count_parameters().total;
  result.train_bytes = files.train.bytes;
  result.valid_bytes = files.valid.bytes;
  result.steps = total_steps(config.train);
  result.step_tokens = config.train.batch_tokens;
  result.flops_per_token = 3 * model.flops_per_token(config.data.context);
  for (const auto& parameter : model.parameters()) {
    const auto bytes = static_cast<int64_t>(parameter.tensor.nbytes());
    result.state_bytes += 4 * bytes;
    result.checkpoint_bytes += 3 * bytes;
  }
  const double seconds = median_step_seconds(trainer, random_step(config));
  result.tokens_per_s = static_cast<double>(result.step_tokens) / seconds;
  result.seconds = seconds * static_cast<double>(result.steps);
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  result.peak_bytes = static_cast<int64_t>(usage.ru_maxrss) * 1024;
  return result;
}

std::string describe(const DryRun& r) {
  const auto bytes = [](int64_t n) { return human_bytes(static_cast<double>(n)); };
  const auto count = [](int64_t n) { return human_count(static_cast<double>(n)); };
  return fmt::format(
      "text        {} to learn from, {} held out\n"
      "parameters  {}, {:.3g} FLOPs a token forward and backward\n"
      "training    {} steps of {} tokens\n"
      "speed       {} tokens/s (measured)\n"
      "time        {}, evaluations and checkpoints not counted\n"
      "memory      {} in all (measured); weights, gradients and moments take {} of it\n"
      "disk        {} a checkpoint\n",
      bytes(r.train_bytes), bytes(r.valid_bytes), count(r.parameters), r.flops_per_token, r.steps, count(r.step_tokens),
      human_count(r.tokens_per_s), human_time(r.seconds), bytes(r.peak_bytes), bytes(r.state_bytes),
      bytes(r.checkpoint_bytes));
}

}  // namespace fox::train
