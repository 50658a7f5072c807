#include "train/run.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <functional>
#include <set>

#include "base/error.h"
#include "base/interrupt.h"
#include "checkpoint/safetensors.h"
#include "support/temporary_folder.h"
#include "train/dry_run.h"
#include "train/small_run.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::final_state;
using test::metrics_of;
using test::small_run;

// A run that nothing disturbs, made once.
struct Undisturbed {
  Undisturbed() : config(small_run(folder.path())) {
    outcome = run_training(config);
    state = final_state(config);
    metrics = metrics_of(config);
  }
  test::TemporaryFolder folder;
  RunConfig config;
  RunOutcome outcome;
  std::map<std::string, std::string> state;
  std::vector<json> metrics;
};

const Undisturbed& undisturbed() {
  static const Undisturbed run;
  return run;
}

// The error of a run and its hint, or "" when there is none.
std::string error_of(const RunConfig& config, const RunOptions& options = {}) {
  try {
    run_training(config, options);
  } catch (const Error& error) {
    return error.what() + std::string(" | ") + error.hint();
  }
  return "";
}

testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

struct Stop {};

// Stops a run by an exception after `step`; what is in memory is lost, as in a crash.
RunOptions stop_after(int64_t step) {
  RunOptions options;
  options.on_step = [step](const StepResult& result) {
    if (result.step == step) throw Stop();
  };
  return options;
}

TEST(Run, LeavesTheFilesThatOthersRead) {
  const auto& run = undisturbed();
  EXPECT_EQ(run.outcome, RunOutcome::kFinished);
  const fs::path dir = run.config.output.dir;
  for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "trainer.json", "trainer.safetensors",
                           "checksums.json"}) {
    EXPECT_TRUE(run.state.contains(name)) << name;
  }
  EXPECT_EQ(json::parse(run.state.at("config.json")).at("vocab_size"), 257);
  const auto state = json::parse(run.state.at("trainer.json"));
  EXPECT_EQ(state.at("step"), 40);
  EXPECT_EQ(state.at("tokens"), 40 * 64);

  const auto run_json = json::parse(read_file(dir / "run.json"));
  for (const char* key : {"config", "version", "commit", "torch", "seed", "threads", "started", "data", "sessions"}) {
    EXPECT_TRUE(run_json.contains(key)) << key;
  }
  RunConfig again = RunConfig::load(dir / "run.toml");
  EXPECT_EQ(again.to_json(), run_json.at("config"));
  EXPECT_EQ(checkpoint::list_checkpoints(test::checkpoints_of(run.config)).size(), 3u);
}

TEST(Run, MetricsTellWhatHappened) {
  std::map<std::string, std::vector<int64_t>> steps;
  for (const auto& line : undisturbed().metrics) steps[line.at("kind")].push_back(line.at("step"));
  EXPECT_EQ(steps["train"].size(), 40u);
  EXPECT_EQ(steps["eval"], (std::vector<int64_t>{8, 16, 24, 32, 40}));
  EXPECT_EQ(steps["gates"], steps["eval"]);
  EXPECT_EQ(steps["sample"], (std::vector<int64_t>{8, 16, 24, 32, 40}));
  const auto& metrics = undisturbed().metrics;
  EXPECT_EQ(metrics.front().at("lr"), 0);
  EXPECT_NEAR(metrics.front().at("loss").get<double>(), std::log(257), 0.1);  // it knows nothing yet
  double last = 0;
  for (const auto& line : metrics) {
    if (line.at("kind") == "train") last = line.at("loss");
    if (line.at("kind") == "eval") {
      EXPECT_NEAR(line.at("perplexity").get<double>(), std::exp(line.at("loss").get<double>()), 1e-6);
    }
    if (line.at("kind") == "gates") {
      EXPECT_EQ(line.at("memory_lengths").size(), 2u);                               // one layer of two heads
      for (const double length : line.at("memory_lengths")) EXPECT_GT(length, 0.5);  // starts at 1 / ln 2
    }
    if (line.at("kind") == "sample") {
      EXPECT_EQ(line.at("text").get<std::string>().front(), 'a');  // the prompt
    }
  }
  EXPECT_LT(last, 4.5);  // and then something
}

TEST(Run, FinishedDoesNothingMore) {
  const auto& run = undisturbed();
  const auto run_json = read_file(fs::path(run.config.output.dir) / "run.json");
  EXPECT_EQ(run_training(run.config), RunOutcome::kAlreadyFinished);
  EXPECT_EQ(read_file(fs::path(run.config.output.dir) / "run.json"), run_json);
  EXPECT_EQ(final_state(run.config), run.state);
}

// In the middle of epochs and between them, on a checkpoint and beside one, before the first, after the last step.
TEST(Run, StoppedAnywhereEndsWithTheSameBits) {
  for (const std::vector<int64_t>& stops : {std::vector<int64_t>{1}, {2}, {13}, {14}, {39}, {40}, {5, 15, 16, 31}}) {
    test::TemporaryFolder folder;
    const RunConfig config = small_run(folder.path());
    for (const int64_t step : stops) EXPECT_THROW(run_training(config, stop_after(step)), Stop);
    EXPECT_EQ(run_training(config), RunOutcome::kFinished);
    EXPECT_EQ(final_state(config), undisturbed().state) << "stopped at " << stops.front();
    EXPECT_EQ(metrics_of(config), undisturbed().metrics) << "stopped at " << stops.front();
  }
}

TEST(Run, ADamagedNewestCheckpointIsSkippedAndWrittenAgain) {
  test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  EXPECT_THROW(run_training(config, stop_after(21)), Stop);
  const auto damaged = test::checkpoints_of(config) / checkpoint::checkpoint_name(20 * 64);
  fs::resize_file(damaged / "trainer.safetensors", 100);
  testing::internal::CaptureStderr();
  EXPECT_EQ(run_training(config), RunOutcome::kFinished);
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(), damaged.string() + " is skipped"));
  EXPECT_EQ(final_state(config), undisturbed().state);
}

TEST(Run, InterruptedSavesAndContinues) {
  test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  const pid_t child = ::fork();
  if (child == 0) {
    catch_interrupts();
    RunOptions options;
    options.on_step = [](const StepResult& result) {
      if (result.step == 7) ::raise(SIGINT);
    };
    ::_exit(run_training(config, options) == RunOutcome::kInterrupted ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(checkpoint::newest_checkpoint(test::checkpoints_of(config))->tokens, 7 * 64);
  EXPECT_EQ(run_training(config), RunOutcome::kFinished);
  EXPECT_EQ(final_state(config), undisturbed().state);
}

TEST(Run, AnotherConfigurationIsRefusedWithItsDifferences) {
  RunConfig config = undisturbed().config;
  config.train.lr = 0.5;
  config.model.hidden_size = 32;
  const auto error = error_of(config);
  EXPECT_TRUE(contains(error, "train.lr is 0.01 there and 0.5 here"));
  EXPECT_TRUE(contains(error, "model.hidden_size is 16 there and 32 here"));
  EXPECT_TRUE(contains(error, "output.dir"));
  EXPECT_FALSE(contains(error, "train.seed"));
  EXPECT_EQ(final_state(undisturbed().config), undisturbed().state);
}

TEST(Run, WhatChangesNothingMayChange) {
  test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  EXPECT_THROW(run_training(config, stop_after(9)), Stop);
  config.output.keep_last = 1;
  config.output.log_interval_steps = 7;
  config.output.tensorboard = false;
  config.train.max_bad_steps = 9;
  EXPECT_EQ(run_training(config), RunOutcome::kFinished);
  EXPECT_EQ(final_state(config), undisturbed().state);
}

TEST(Run, OneThatAnOlderFoxBeganIsContinued) {
  test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  EXPECT_THROW(run_training(config, stop_after(9)), Stop);
  const auto file = fs::path(config.output.dir) / "run.json";
  auto recorded = json::parse(read_file(file));
  recorded["config"]["data"].erase("format");  // it did not know the key
  write_file_atomically(file, recorded.dump());
  EXPECT_EQ(run_training(config), RunOutcome::kFinished);
  EXPECT_EQ(final_state(config), undisturbed().state);
}

TEST(Run, ChangedTextIsRefused) {
  test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  EXPECT_THROW(run_training(config, stop_after(9)), Stop);
  std::ofstream(folder.path() / "text" / "1.txt") << test::random_text(307, 99);
  EXPECT_TRUE(contains(error_of(config), "has changed since it was started"));
}

TEST(Run, HasOneWriter) {
  test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  std::string second;
  RunOptions options;
  options.on_step = [&](const StepResult& result) {
    if (result.step == 2) second = error_of(config);
  };
  run_training(config, options);
  EXPECT_TRUE(contains(second, "is in use by process " + std::to_string(::getpid())));
  EXPECT_EQ(final_state(config), undisturbed().state);
}

TEST(Run, StopsAfterTheStatedNumberOfBadSteps) {
  test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  config.train.lr = 1e30;  // the first step with a rate above 0 spoils the weights for good
  config.train.warmup_tokens = 10 * 64;
  config.train.max_bad_steps = 3;
  std::vector<int64_t> bad;
  RunOptions options;
  options.on_step = [&](const StepResult& result) {
    if (!result.fault.empty()) bad.push_back(result.step);
  };
  testing::internal::CaptureStderr();
  const auto error = error_of(config, options);
  const auto progress = testing::internal::GetCapturedStderr();
  ASSERT_GE(bad.size(), 3u) << error;
  EXPECT_TRUE(contains(error, "training stopped at step " + std::to_string(bad.back()) + ": 3 steps in a row"));
  EXPECT_TRUE(contains(progress, "step " + std::to_string(bad.back()) + " was not applied"));
  const auto last = metrics_of(config).back();
  EXPECT_EQ(last.at("step"), bad.back());
  EXPECT_TRUE(last.contains("fault"));
}

TEST(Run, StartsFromOtherWeights) {
  test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  config.train.lr = config.train.min_lr = 0;
  config.train.weight_decay = 0;
  RunOptions options;
  options.init_from = undisturbed().config.output.dir;
  // It remembers where it came from, also when it was stopped before its first checkpoint.
  RunOptions stopped = stop_after(1);
  stopped.init_from = options.init_from;
  EXPECT_THROW(run_training(config, stopped), Stop);
  EXPECT_EQ(run_training(config), RunOutcome::kFinished);
  EXPECT_EQ(final_state(config).at("model.safetensors"), undisturbed().state.at("model.safetensors"));
  options.init_from = folder.path();
  EXPECT_TRUE(contains(error_of(config, options), "it started from"));

  RunConfig other = small_run(folder.path());
  other.output.dir += "-other";
  other.model.hidden_size = 32;
  options.init_from = undisturbed().config.output.dir;
  EXPECT_TRUE(contains(error_of(other, options), "model.norm.weight"));
}

TEST(Run, EachPrecisionIsContinuedBitForBit) {
  for (const char* precision : {"bf16", "float64"}) {
    test::TemporaryFolder folder, whole_folder;
    RunConfig config = small_run(folder.path()), whole = small_run(whole_folder.path());
    config.train.precision = whole.train.precision = precision;
    EXPECT_THROW(run_training(config, stop_after(15)), Stop);
    EXPECT_EQ(run_training(config), RunOutcome::kFinished);
    EXPECT_EQ(run_training(whole), RunOutcome::kFinished);
    EXPECT_EQ(final_state(config), final_state(whole)) << precision;
    EXPECT_NE(final_state(config).at("model.safetensors"), undisturbed().state.at("model.safetensors"));
  }
}

// ---- text that will not do (cases 31 and the split of the data)

std::string error_after(const std::function<void(RunConfig&, const fs::path&)>& change) {
  test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  change(config, folder.path());
  return error_of(config);
}

TEST(Text, TooShortSaysByHowMuchAndLeavesNothing) {
  test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  std::ofstream(folder.path() / "short.txt") << "ten bytes.";
  config.data.train = {(folder.path() / "short.txt").string()};
  const auto error = error_of(config);
  EXPECT_TRUE(contains(error, "11"));  // ten bytes and the token that starts the document
  EXPECT_TRUE(contains(error, "16"));
  EXPECT_FALSE(fs::exists(config.output.dir));
}

TEST(Text, EmptyDocumentsAreNoObstacle) {
  EXPECT_EQ(error_after([](RunConfig&, const fs::path& folder) { std::ofstream(folder / "text" / "0.txt") << ""; }),
            "");
}

TEST(Text, MissingIsNamed) {
  EXPECT_TRUE(contains(error_after([](RunConfig& config, const fs::path&) { config.data.train = {"/no/such/text"}; }),
                       "data.train: there is no /no/such/text"));
  EXPECT_TRUE(contains(error_after([](RunConfig& config, const fs::path& folder) {
                         fs::create_directory(folder / "nothing");
                         config.data.valid = {(folder / "nothing").string()};
                       }),
                       "holds no *.txt or *.jsonl file"));
}

TEST(Text, HeldOutTextIsNotTrainedOn) {
  EXPECT_TRUE(contains(error_after([](RunConfig& config, const fs::path& folder) {
                         config.data.valid = {(folder / "text" / "." / "1.txt").string()};
                       }),
                       "is both in data.train and in data.valid"));
  EXPECT_TRUE(contains(error_after([](RunConfig&, const fs::path& folder) {
                         fs::copy_file(folder / "text" / "1.txt", folder / "valid.txt",
                                       fs::copy_options::overwrite_existing);
                       }),
                       "is a copy of"));
}

TEST(Text, AFractionHoldsOutTheLastDocuments) {
  test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  config.data.valid.clear();
  config.data.valid_fraction = 0.3;
  EXPECT_EQ(error_of(config), "");
  const auto data = json::parse(read_file(fs::path(config.output.dir) / "run.json")).at("data");
  EXPECT_EQ(data.at("train").at("documents"), 2);
  EXPECT_EQ(data.at("valid").at("tokens"), 314 + 1);
  config.output.dir += "-one";
  config.data.train = {(folder.path() / "text" / "0.txt").string()};
  EXPECT_TRUE(contains(error_of(config), "leaves nothing to train on"));
  EXPECT_FALSE(fs::exists(config.output.dir)) << "a start that failed leaves nothing behind";
  fs::create_directory(config.output.dir);
  EXPECT_NE(error_of(config), "");
  EXPECT_TRUE(fs::exists(config.output.dir)) << "but what was there";
}

TEST(Text, AVocabularyTooSmallForTheTokenizerIsRefused) {
  EXPECT_TRUE(
      contains(error_after([](RunConfig& config, const fs::path&) { config.model.vocab_size = 100; }), "257 ids"));
}

TEST(Text, AnUnknownTokenizerIsRefused) {
  EXPECT_TRUE(contains(error_after([](RunConfig& config, const fs::path&) { config.data.tokenizer = "gpt3"; }),
                       "there is no tokenizer 'gpt3'"));
}

TEST(Run, AnUnknownDeviceIsRefused) {
  EXPECT_TRUE(
      contains(error_after([](RunConfig& config, const fs::path&) { config.train.device = "abacus"; }), "abacus"));
}

TEST(Run, AFolderThatMayNotBeWrittenIsNamed) {
  test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  fs::create_directory(config.output.dir);
  ::chmod(folder.path().c_str(), 0755);
  const pid_t child = ::fork();
  if (child == 0) {
    ::chmod(config.output.dir.c_str(), 0555);
    if (::geteuid() == 0 && ::setuid(65534) != 0) ::_exit(2);  // permissions do not bind the administrator
    ::_exit(contains(error_of(config), config.output.dir) ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// ---- dry run

TEST(DryRun, MeasuresAndWritesNothing) {
  test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  const auto result = dry_run(config);
  EXPECT_FALSE(fs::exists(config.output.dir));
  EXPECT_EQ(result.steps, 40);
  EXPECT_EQ(result.train_bytes, 300 + 307 + 314);
  EXPECT_EQ(result.valid_bytes, 400);
  EXPECT_GT(result.tokens_per_s, 0);
  EXPECT_GT(result.peak_bytes, result.state_bytes);
  EXPECT_EQ(result.state_bytes, 16 * result.parameters);
  // A checkpoint is weights and moments, and some headers.
  const auto& state = undisturbed().state;
  EXPECT_NEAR(static_cast<double>(result.checkpoint_bytes),
              static_cast<double>(state.at("model.safetensors").size() + state.at("trainer.safetensors").size()), 1e4);
  EXPECT_FALSE(describe(result).empty());
}

}  // namespace
}  // namespace fox::train
