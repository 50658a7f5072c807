#include "train/run.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "base/event_file.h"
#include "base/files.h"
#include "base/interrupt.h"
#include "base/progress.h"
#include "checkpoint/hf_directory.h"
#include "data/batch_stream.h"
#include "eval/per_token_loss.h"
#include "infer/generate.h"
#include "train/checkpoint_store.h"
#include "train/checkpoint_writer.h"
#include "train/corpora.h"
#include "train/metrics.h"
#include "train/prefetch.h"
#include "train/run_directory.h"
#include "train/setup.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Whether a step that went from `before` to `after` tokens passed a multiple of `interval` (0: never).
bool passes(int64_t before, int64_t after, int64_t interval) {
  return interval > 0 && after / interval > before / interval;
}

/// All parts of a run in progress.
class Run {
 public:
  Run(RunConfig config, data::Tokenizer tokenizer, RunDirectory& directory, CheckpointStore& checkpoints,
      const RunOptions& options);
  RunOutcome train(const std::optional<checkpoint::CheckpointEntry>& from);

 private:
  void restore(const checkpoint::CheckpointEntry& entry);
  void step();
  void begin_step();
  void finish_step();
  void log(const StepResult& result);
  void warn_of_bad_step(const StepResult& result);
  void evaluate();
  void write_sample();
  checkpoint::NamedTensors weights() const;
  void save();
  /// Whether the steps begun are all there are to be, and whether they are done.
  bool all_begun() const { return trainer_.tokens_begun() >= config_.train.max_tokens; }
  bool finished() const { return trainer_.state().tokens >= config_.train.max_tokens; }

  RunConfig config_;
  data::Tokenizer tokenizer_;
  RunDirectory& directory_;
  CheckpointStore& checkpoints_;
  const RunOptions& options_;
  Corpora corpora_;
  model::LanguageModel model_;
  Trainer trainer_;
  /// Steps begun before the one before is looked at: a GPU then always has work queued.
  int64_t lag_;
  CheckpointWriter writer_;
  std::unique_ptr<Prefetcher> batches_;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<EventFile> events_;
  std::unique_ptr<Progress> progress_;
  int64_t saved_tokens_ = -1;  ///< of the newest checkpoint
  int64_t evaluated_step_ = -1;
  // Since the last line of metrics, evaluations and checkpoints left out.
  int64_t timed_tokens_ = 0;
  double timed_seconds_ = 0, waited_before_ = 0;
  std::chrono::steady_clock::time_point timed_from_;
};

Run::Run(RunConfig config, data::Tokenizer tokenizer, RunDirectory& directory, CheckpointStore& checkpoints,
         const RunOptions& options)
    : config_(std::move(config)),
      tokenizer_(std::move(tokenizer)),
      directory_(directory),
      checkpoints_(checkpoints),
      options_(options),
      corpora_(open_corpora(config_, tokenizer_, directory_.path())),
      model_(make_model(config_, directory_.init_from())),
      trainer_(model_, trainer_options(config_.train)),
      lag_(model_.parameters().front().tensor.is_cpu() ? 0 : 1),
      writer_(checkpoints, [this](const fs::path& dir) { tokenizer_.save_in(dir); }) {}

void Run::restore(const checkpoint::CheckpointEntry& entry) {
  const fs::path file = entry.dir / "trainer.json";
  const auto state = json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
  load_weights(model_, entry.dir);
  const auto moments = checkpoint::read_safetensors(entry.dir / "trainer.safetensors").tensors;
  trainer_.restore(state.is_discarded() ? json::object() : state, moments, file.string());
  saved_tokens_ = entry.tokens;
}

RunOutcome Run::train(const std::optional<checkpoint::CheckpointEntry>& from) {
  if (from) restore(*from);
  const TrainerState start = trainer_.state();
  directory_.begin(start.tokens, corpora_.identity, model_.count_parameters().total);
  metrics_ = std::make_unique<MetricsLog>(directory_.path() / "metrics.jsonl", start.step);
  if (config_.output.tensorboard) events_ = std::make_unique<EventFile>(directory_.path() / "tb", start.step);
  if (options_.on_begin) options_.on_begin(config_);
  progress_ = std::make_unique<Progress>("train", total_steps(config_.train) * config_.train.batch_tokens, "tokens");
  if (start.step > 0) progress_->message(fmt::format("continuing at step {}, {} tokens", start.step, start.tokens));
  progress_->update(start.tokens);
  const int64_t rows = config_.train.micro_batch_tokens / config_.data.context;
  batches_ = std::make_unique<Prefetcher>([this, rows](int64_t i) { return corpora_.train->get(i * rows, rows); },
                                          start.tokens / config_.train.micro_batch_tokens,
                                          2 * config_.train.batch_tokens / config_.train.micro_batch_tokens, lag_ > 0);
  if (config_.output.checkpoint_interval_tokens > 0) writer_.prepare(weights(), trainer_.tensors());

  timed_from_ = std::chrono::steady_clock::now();
  while (!all_begun() && !interrupted()) step();
  while (trainer_.pending() > 0) finish_step();
  if (finished() && evaluated_step_ != trainer_.state().step) {
    evaluate();
    write_sample();
  }
  if (saved_tokens_ != trainer_.state().tokens) save();
  writer_.finish();
  progress_->finish();
  return finished() ? RunOutcome::kFinished : RunOutcome::kInterrupted;
}

void Run::step() {
  const int64_t before = trainer_.tokens_begun();
  begin_step();
  const int64_t after = trainer_.tokens_begun();
  const bool evaluates = passes(before, after, config_.eval.interval_tokens);
  const bool saves = passes(before, after, config_.output.checkpoint_interval_tokens);
  const int64_t lag = evaluates || saves ? 0 : lag_;  // both want the state between two steps
  while (trainer_.pending() > lag) finish_step();
  writer_.check();
  if (!evaluates && !saves) return;
  if (evaluates) {
    evaluate();
    write_sample();
  }
  if (saves) save();
  timed_from_ = std::chrono::steady_clock::now();
}

void Run::begin_step() {
  std::vector<data::Batch> batches;
  for (int64_t tokens = 0; tokens < config_.train.batch_tokens; tokens += config_.train.micro_batch_tokens) {
    batches.push_back(batches_->next());
  }
  trainer_.begin_step(batches);
}

void Run::finish_step() {
  const StepResult result = trainer_.finish_step();
  timed_seconds_ += seconds_since(timed_from_);
  timed_from_ = std::chrono::steady_clock::now();
  timed_tokens_ += config_.train.batch_tokens;

  if (!result.fault.empty()) warn_of_bad_step(result);
  progress_->update(result.tokens, fmt::format("loss {:.4f}, gradient norm {:.3g}", result.loss, result.grad_norm));
  log(result);
  if (options_.on_step) options_.on_step(result);
  if (!result.fault.empty() && trainer_.state().bad_steps >= config_.train.max_bad_steps) {
    throw Error(
        fmt::format("training stopped at step {}: {} steps in a row were not finite (the last: {})", result.step,
                    trainer_.state().bad_steps, result.fault),
        "lower train.lr or lengthen train.warmup_tokens in another output.dir; the checkpoints of this run are good");
  }
}

void Run::warn_of_bad_step(const StepResult& result) {
  const int64_t context = config_.data.context;
  const int64_t first = (result.tokens - config_.train.batch_tokens) / context;
  progress_->message(fmt::format("warning: step {} was not applied: {} (contexts {} to {} of the data)", result.step,
                                 result.fault, first, result.tokens / context - 1));
}

void Run::log(const StepResult& result) {
  const bool due = result.step % config_.output.log_interval_steps == 0 || result.step == 1 || finished();
  if (!due && result.fault.empty()) return;
  const double speed = timed_seconds_ > 0 ? static_cast<double>(timed_tokens_) / timed_seconds_ : 0;
  const double waited = batches_->waited() - waited_before_;
  const double data_wait = timed_seconds_ > 0 ? waited / timed_seconds_ : 0;
  waited_before_ += waited;
  timed_seconds_ = 0;
  timed_tokens_ = 0;
  json line{{"kind", "train"},       {"step", result.step},           {"tokens", result.tokens},
            {"loss", result.loss},   {"grad_norm", result.grad_norm}, {"lr", result.lr},
            {"tokens_per_s", speed}, {"data_wait", data_wait},        {"time", unix_time()}};
  if (!result.fault.empty()) line["fault"] = result.fault;
  metrics_->write(line);
  if (!events_) return;
  events_->scalar(result.step, "train/loss", result.loss);
  events_->scalar(result.step, "train/grad_norm", result.grad_norm);
  events_->scalar(result.step, "train/lr", result.lr);
  events_->scalar(result.step, "train/tokens_per_s", speed);
}

void Run::evaluate() {
  const TrainerState& state = trainer_.state();
  evaluated_step_ = state.step;
  if (!corpora_.valid) return;
  const at::NoGradGuard no_grad;
  const auto held_out =
      eval::held_out_loss(model_, *corpora_.valid, tokenizer_, config_.data.context, config_.eval.max_tokens);
  metrics_->write({{"kind", "eval"},
                   {"step", state.step},
                   {"tokens", state.tokens},
                   {"loss", held_out.loss},
                   {"perplexity", held_out.perplexity},
                   {"bits_per_byte", held_out.bits_per_byte}});
  progress_->message(fmt::format("step {}: held-out loss {:.4f}, perplexity {:.2f}, {:.4f} bits a byte", state.step,
                                 held_out.loss, held_out.perplexity, held_out.bits_per_byte));
  if (!events_) return;
  events_->scalar(state.step, "eval/loss", held_out.loss);
  events_->scalar(state.step, "eval/perplexity", held_out.perplexity);
  events_->scalar(state.step, "eval/bits_per_byte", held_out.bits_per_byte);
}

void Run::write_sample() {
  if (config_.eval.sample_tokens == 0) return;
  const at::NoGradGuard no_grad;
  infer::GenerateOptions options;
  options.max_tokens = config_.eval.sample_tokens;
  options.sampling.seed = config_.train.seed;
  const TrainerState& state = trainer_.state();
  const std::string& prompt = config_.eval.sample_prompt;
  const auto sample = infer::generate(model_, tokenizer_, prompt, options);
  if (sample.reason == infer::FinishReason::kCancelled) return;
  const std::string text = prompt + sample.text;
  metrics_->write({{"kind", "sample"}, {"step", state.step}, {"tokens", state.tokens}, {"text", text}});
  if (events_) events_->text(state.step, "sample", text);
}

checkpoint::NamedTensors Run::weights() const {
  checkpoint::NamedTensors weights;
  for (const auto& parameter : model_.parameters()) weights.emplace(parameter.name, parameter.tensor.detach());
  return weights;
}

void Run::save() {
  metrics_->sync();
  writer_.save(trainer_.state().tokens, weights(), trainer_.tensors(),
               {{"config.json", config_.model.to_json().dump(2) + "\n"},
                {"trainer.json", trainer_.state_json().dump(2) + "\n"}});
  saved_tokens_ = trainer_.state().tokens;
}

}  // namespace

RunOutcome run_training(RunConfig config, const RunOptions& options) {
  set_threads(config.train.threads);
  data::Tokenizer tokenizer = make_tokenizer(config.data);
  fit_vocabulary(config.model, tokenizer);
  RunDirectory directory(config, options.init_from);
  if (options.init_from) check_model_tokenizer(*options.init_from, tokenizer);
  CheckpointStore checkpoints(directory.path() / "checkpoints",
                              {config.output.keep_last, config.output.keep_every_tokens, options.on_checkpoint_stage});
  const auto warn = [](const std::string& line) { fmt::print(stderr, "warning: {}\n", line); };
  const auto newest = checkpoints.newest(warn);
  if (newest && newest->tokens >= config.train.max_tokens) return RunOutcome::kAlreadyFinished;
  return Run(std::move(config), std::move(tokenizer), directory, checkpoints, options).train(newest);
}

}  // namespace fox::train
