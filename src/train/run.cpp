#include "train/run.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/interrupt.h"
#include "eval/gates.h"
#include "eval/per_token_loss.h"
#include "infer/generate.h"
#include "infer/load_model.h"
#include "train/checkpoint_store.h"
#include "train/checkpoint_writer.h"
#include "train/corpora.h"
#include "train/prefetch.h"
#include "train/ranks.h"
#include "train/run_directory.h"
#include "train/run_log.h"
#include "train/setup.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Whether a step that went from `before` to `after` tokens passed a multiple of `interval` (0: never).
bool passes(int64_t before, int64_t after, int64_t interval) {
  return interval > 0 && after / interval > before / interval;
}

/// What rank 0 alone has: it writes.
struct Leader {
  Leader(const RunConfig& config, const RunOptions& options)
      : directory(config, options.init_from),
        checkpoints(directory.path() / "checkpoints",
                    {config.output.keep_last, config.output.keep_every_tokens, options.on_checkpoint_stage}),
        newest(checkpoints.newest([](const std::string& line) { fmt::print(stderr, "warning: {}\n", line); })) {}

  RunDirectory directory;
  CheckpointStore checkpoints;
  std::optional<checkpoint::CheckpointEntry> newest;  ///< where the run goes on from
};

/// Where the run goes on from, as all ranks know it: the file's name and content of trainer.json, or null at the start.
json beginning_of(const Leader* leader, const dist::ProcessGroup& ranks) {
  json beginning;
  if (leader && leader->newest) {
    const fs::path file = leader->newest->dir / "trainer.json";
    const auto state = json::parse(read_file(file), nullptr, /*allow_exceptions=*/false);
    beginning = {{"file", file.string()}, {"state", state.is_discarded() ? json::object() : state}};
    beginning["tokens"] = leader->newest->tokens;
  }
  return json::parse(ranks.gather_texts(beginning.dump()).front());
}

/// Rank 0 builds the token stores that are missing; the others then find them.
Corpora open_on_all(const dist::ProcessGroup& ranks, const RunConfig& config, const data::Tokenizer& tokenizer) {
  Corpora corpora;
  const auto open = [&] { corpora = open_corpora(config, tokenizer, config.output.dir); };
  ranks.first_alone(open);
  if (ranks.rank() > 0) open();
  check_same_on_all(ranks, "text", corpora.identity.dump());
  return corpora;
}

/// All parts of a run in progress on one rank.
class Run {
 public:
  Run(const RunConfig& config, data::Tokenizer tokenizer, const dist::ProcessGroup& ranks, Leader* leader,
      const RunOptions& options);
  RunOutcome train(const json& beginning);

 private:
  void restore(const json& beginning);
  void step();
  void begin_step();
  void finish_step();
  void log(const StepResult& result);
  void evaluate();
  void look_at_gates();
  void write_sample();
  checkpoint::NamedTensors weights() const;
  void save();
  /// Whether the steps begun are all there are to be, and whether they are done.
  bool all_begun() const { return trainer_.tokens_begun() >= config_.train.max_tokens; }
  bool finished() const { return trainer_.state().tokens >= config_.train.max_tokens; }
  /// Whether to stop early: all ranks after the same step.
  bool stops() const { return ranks_.size() == 1 ? interrupted() : stops_; }

  RunConfig config_;
  data::Tokenizer tokenizer_;
  dist::ProcessGroup ranks_;  ///< whose gradients add up
  Leader* leader_;            ///< nothing on the other ranks
  const RunOptions& options_;
  Corpora corpora_;
  StepShare share_;
  std::shared_ptr<const dist::SequenceShard> shard_;  ///< of this rank's contexts, or nothing
  model::LanguageModel model_;
  Trainer trainer_;
  /// Steps begun before the one before is looked at: a GPU then always has work queued.
  int64_t lag_;
  std::unique_ptr<CheckpointWriter> writer_;  ///< the leader's, as is the log
  std::unique_ptr<Prefetcher> batches_;
  std::unique_ptr<RunLog> log_;
  bool stops_ = false;
  int64_t saved_tokens_ = -1;  ///< of the newest checkpoint
  int64_t evaluated_step_ = -1;
  // Since the last line of metrics, evaluations and checkpoints left out.
  int64_t timed_tokens_ = 0;
  double timed_seconds_ = 0, waited_before_ = 0;
  std::chrono::steady_clock::time_point timed_from_;
};

Run::Run(const RunConfig& config, data::Tokenizer tokenizer, const dist::ProcessGroup& ranks, Leader* leader,
         const RunOptions& options)
    : config_(config),
      tokenizer_(std::move(tokenizer)),
      ranks_(ranks),
      leader_(leader),
      options_(options),
      corpora_(open_on_all(ranks_, config_, tokenizer_)),
      share_(share_of_step(config_, ranks_.rank(), ranks_.size())),
      shard_(split_sequences(config_.train.sequence_ranks, ranks_)),
      model_(make_model(config_, leader_ ? leader_->directory.init_from() : std::nullopt)),
      trainer_(model_, trainer_options(config_, model_), ranks_, shard_),
      lag_(model_.parameters().front().tensor.is_cpu() ? 0 : 1) {
  if (!leader_) return;
  warn_of_idle_graph(config_.train.cuda_graph, model_.parameters().front().tensor.device(), ranks_.size());
  writer_ = std::make_unique<CheckpointWriter>(
      leader_->checkpoints, [this](const fs::path& dir) { tokenizer_.save_in(dir); }, [this] { ranks_.check(); });
}

void Run::restore(const json& beginning) {
  const std::string file = beginning.at("file");
  checkpoint::NamedTensors moments;
  if (leader_) {
    infer::load_weights(model_, leader_->newest->dir);  // whose checksums were right when it was found
    moments = checkpoint::read_safetensors(leader_->newest->dir / "trainer.safetensors").tensors;
  }
  trainer_.restore(beginning.at("state"), moments, file);
  saved_tokens_ = beginning.at("tokens");
}

RunOutcome Run::train(const json& beginning) {
  if (!beginning.is_null()) restore(beginning);
  const TrainerState start = trainer_.state();
  if (leader_) {
    leader_->directory.begin(start.tokens, corpora_.identity, model_.count_parameters().total, ranks_.size());
    if (options_.on_begin) options_.on_begin(config_);
    log_ = std::make_unique<RunLog>(config_, start);
    if (config_.output.checkpoint_interval_tokens > 0) writer_->prepare(weights(), trainer_.shapes());
  }
  const auto read = [this](int64_t index) {
    const auto rows = share_.rows(index);
    const auto batch = corpora_.train->get(rows.begin, rows.count);
    return shard_ ? data::Batch{shard_->take(batch.ids_BT), shard_->take(batch.labels_BT)} : batch;
  };
  batches_ = std::make_unique<Prefetcher>(read, start.tokens / config_.train.batch_tokens * share_.micro_batches,
                                          2 * share_.micro_batches, lag_ > 0);
  timed_from_ = std::chrono::steady_clock::now();
  while (!all_begun() && !stops()) step();
  while (trainer_.pending() > 0) finish_step();
  if (finished() && evaluated_step_ != trainer_.state().step) {
    evaluate();
    write_sample();
  }
  if (saved_tokens_ != trainer_.state().tokens) save();
  if (leader_) {
    writer_->finish();
    log_->finish();
  }
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
  if (leader_) writer_->check();
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
  for (int64_t i = 0; i < share_.micro_batches; ++i) batches.push_back(batches_->next());
  if (interrupted()) trainer_.ask_to_stop();
  trainer_.begin_step(batches);
}

void Run::finish_step() {
  const StepResult result = trainer_.finish_step();
  timed_seconds_ += seconds_since(timed_from_);
  timed_from_ = std::chrono::steady_clock::now();
  timed_tokens_ += config_.train.batch_tokens;
  stops_ = stops_ || result.stop;

  if (log_) log(result);
  if (options_.on_step) options_.on_step(result);
  if (!result.fault.empty() && trainer_.state().bad_steps >= config_.train.max_bad_steps) {
    throw Error(
        fmt::format("training stopped at step {}: {} steps in a row were not finite (the last: {})", result.step,
                    trainer_.state().bad_steps, result.fault),
        "lower train.lr or lengthen train.warmup_tokens in another output.dir; the checkpoints of this run are good");
  }
}

void Run::log(const StepResult& result) {
  log_->show(result);
  const bool due = result.step % config_.output.log_interval_steps == 0 || result.step == 1 || finished();
  if (!due && result.fault.empty()) return;
  const double speed = timed_seconds_ > 0 ? static_cast<double>(timed_tokens_) / timed_seconds_ : 0;
  const double waited = batches_->waited() - waited_before_;
  const double data_wait = timed_seconds_ > 0 ? waited / timed_seconds_ : 0;
  waited_before_ += waited;
  timed_seconds_ = 0;
  timed_tokens_ = 0;
  log_->write_step(result, speed, data_wait);
}

// Every rank does this and the sample, with the same result: none has to wait for one that does it for all.
void Run::evaluate() {
  const TrainerState& state = trainer_.state();
  evaluated_step_ = state.step;
  if (!corpora_.valid) return;
  const at::NoGradGuard no_grad;
  const auto held_out =
      eval::held_out_loss(model_, *corpora_.valid, tokenizer_, config_.data.context, config_.eval.max_tokens);
  ranks_.check();
  if (log_) log_->write_evaluation(state, held_out);
  look_at_gates();
}

/// How far the heads look by now, over one context; not one that takes several ranks to hold.
void Run::look_at_gates() {
  if (shard_) return;
  if (config_.model.kind() != "forgetting_transformer" || corpora_.valid->num_tokens() < config_.data.context) return;
  const auto gates =
      eval::analyse_gates(model_, *corpora_.valid, tokenizer_, {.length = config_.data.context, .windows = 1});
  ranks_.check();
  if (log_ && gates.has_gates) log_->write_gates(trainer_.state(), gates);
}

void Run::write_sample() {
  if (config_.eval.sample_tokens == 0) return;
  const at::NoGradGuard no_grad;
  infer::GenerateOptions options;
  options.max_tokens = config_.eval.sample_tokens;
  options.sampling.seed = config_.train.seed;
  const std::string& prompt = config_.eval.sample_prompt;
  const auto sample = infer::generate(model_, tokenizer_, prompt, options);
  ranks_.check();
  if (sample.reason != infer::FinishReason::kCancelled && log_)
    log_->write_sample(trainer_.state(), prompt + sample.text);
}

checkpoint::NamedTensors Run::weights() const {
  checkpoint::NamedTensors weights;
  for (const auto& parameter : model_.parameters()) weights.emplace(parameter.name, parameter.tensor.detach());
  return weights;
}

void Run::save() {
  saved_tokens_ = trainer_.state().tokens;
  const auto state = trainer_.state_json().dump(2) + "\n";
  if (!leader_) return trainer_.visit_tensors([](const std::string&, const at::Tensor&) {});
  log_->sync();
  writer_->save(saved_tokens_, weights(), [this](const TensorSink& sink) { trainer_.visit_tensors(sink); },
                {{"config.json", config_.model.to_json().dump(2) + "\n"}, {"trainer.json", state}});
}

RunOutcome train_among(const dist::ProcessGroup& ranks, RunConfig config, data::Tokenizer tokenizer,
                       const RunOptions& options) {
  std::optional<Leader> leader;
  if (ranks.rank() == 0) leader.emplace(config, options);
  if (options.init_from) check_model_tokenizer(*options.init_from, tokenizer);
  const json beginning = beginning_of(leader ? &*leader : nullptr, ranks);
  if (!beginning.is_null() && beginning.at("tokens") >= config.train.max_tokens) return RunOutcome::kAlreadyFinished;
  choose_device(config.train.device, options.launch);
  return Run(config, std::move(tokenizer), ranks, leader ? &*leader : nullptr, options).train(beginning);
}

}  // namespace

RunOutcome run_training(RunConfig config, const RunOptions& options) {
  set_threads(config.train.threads, options.launch.local_size);
  data::Tokenizer tokenizer = make_tokenizer(config.data);
  fit_vocabulary(config.model, tokenizer);
  const auto ranks = join_ranks(config, options.launch);
  try {
    return train_among(ranks, std::move(config), std::move(tokenizer), options);
  } catch (const std::exception& error) {
    ranks.report_failure(error.what());
    throw;
  }
}

}  // namespace fox::train
