// Runs on data that is tokens already: LongCrawl64's arrays and stores of `fox tokenize`.
#include "train/corpora.h"

#include <gtest/gtest.h>

#include <functional>

#include "base/error.h"
#include "eval/held_out_text.h"
#include "infer/load_model.h"
#include "support/longcrawl64_store.h"
#include "support/temporary_folder.h"
#include "train/small_run.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using test::small_run;

/// What run_training throws, or "".
std::string error_of(const RunConfig& config) {
  try {
    run_training(config);
  } catch (const Error& error) {
    return error.what() + std::string(" | ") + error.hint();
  }
  return "";
}

testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "no '" << part << "' in: " << text;
}

/// A run on LongCrawl64: 13 documents of 64 tokens, which are 3 batches of 4 and four columns of contexts of 16.
RunConfig published_run(const fs::path& folder) {
  RunConfig config = small_run(folder);
  test::LongCrawl64Store(folder / "train.zarr", 13, 64, 8);
  test::LongCrawl64Store(folder / "heldout.zarr", 5, 64, 16);
  config.data.format = "longcrawl64";
  config.data.train = {(folder / "train.zarr").string()};
  config.data.valid = {(folder / "heldout.zarr").string()};
  config.data.tokenizer = "gpt2-json";
  config.train.max_tokens = 12 * 64;
  return config;
}

TEST(LongCrawl64Run, TrainsMeasuresAndGoesOnAsIfNeverStopped) {
  test::TemporaryFolder folder;
  RunConfig config = published_run(folder.path());
  ASSERT_EQ(error_of(config), "");
  const auto state = test::final_state(config);
  EXPECT_EQ(test::metrics_of(config).back().at("kind"), "sample");
  const auto loaded = infer::load_model(config.output.dir, at::kCPU);
  const eval::HeldOutText text(loaded, {});
  EXPECT_EQ(text.store().num_tokens(), 5 * 64);

  config.output.dir += "-again";
  struct Stop {};
  RunOptions options;
  options.on_step = [](const StepResult& result) {
    if (result.step == 9) throw Stop();
  };
  EXPECT_THROW(run_training(config, options), Stop);
  ASSERT_EQ(error_of(config), "");
  EXPECT_TRUE(test::final_state(config) == state);
}

TEST(LongCrawl64Run, MoreThanAnEpochIsRefused) {
  test::TemporaryFolder folder;
  RunConfig config = published_run(folder.path());
  config.train.max_tokens += 1;
  EXPECT_TRUE(contains(error_of(config), "holds 768 tokens for batches of 64, 64 fewer than the 832"));
  config.train.max_tokens -= 1;
  config.data.train = config.data.valid;
  EXPECT_TRUE(contains(error_of(config), "both in data.train and in data.valid"));
}

TEST(LongCrawl64Run, MissingChunksAreFoundBeforeTheFirstStep) {
  test::TemporaryFolder folder;
  const RunConfig config = published_run(folder.path());
  RunOptions options;
  options.on_step = [](const StepResult&) { ADD_FAILURE() << "it has begun"; };
  for (const char* chunk : {"train.zarr/1.7", "heldout.zarr/0.3"}) {
    fs::rename(folder.path() / chunk, folder.path() / "chunk");
    try {
      run_training(config, options);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_TRUE(contains(error.what(), (folder.path() / chunk).string() + " is missing"));
    }
    fs::rename(folder.path() / "chunk", folder.path() / chunk);
  }
}

TEST(LongCrawl64Run, AMissingArrayIsNamed) {
  test::TemporaryFolder folder;
  RunConfig config = published_run(folder.path());
  config.data.valid = {(folder.path() / "nowhere.zarr").string()};
  EXPECT_TRUE(contains(error_of(config), "data.valid: there is no folder " + config.data.valid[0]));
}

TEST(LongCrawl64Run, ItsArraysAreNoText) {
  test::TemporaryFolder folder;
  RunConfig config = published_run(folder.path());
  config.data.format = "text";
  EXPECT_TRUE(contains(error_of(config), "set data.format = \"longcrawl64\""));
}

TEST(SentencePieceRun, KeepsItsModelBesideTheWeights) {
  test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  config.data.tokenizer = FOX_SOURCE_DIR "/tests/data/sentence_piece/bpe.model";
  ASSERT_EQ(error_of(config), "");
  const auto loaded = infer::load_model(config.output.dir, at::kCPU);
  EXPECT_TRUE(fs::exists(loaded.location.dir / "tokenizer.model"));
  EXPECT_FALSE(fs::exists(loaded.location.dir / "tokenizer.json"));
  EXPECT_EQ(loaded.tokenizer.fingerprint(), data::Tokenizer::load(config.data.tokenizer).fingerprint());
  EXPECT_NO_THROW(eval::HeldOutText(loaded, {}));
  // Tokens of another tokenizer are not taken for this one's.
  const fs::path other = folder.path() / "other";
  data::build_token_store({config.data.valid[0]}, data::Tokenizer::gpt2(0), other);
  try {
    eval::HeldOutText(loaded, {other});
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), other.string() + " was made with another tokenizer than the model's");
  }
}

class StoreRun : public ::testing::Test {
 protected:
  void SetUp() override {
    config_ = small_run(folder_.path());
    for (auto* part : {&config_.data.train, &config_.data.valid}) {
      const fs::path dir = folder_.path() / (part == &config_.data.train ? "train-tokens" : "valid-tokens");
      data::build_token_store({part->begin(), part->end()}, data::Tokenizer::gpt2(0), dir);
      text_.push_back(*part);
      *part = {dir.string()};
    }
  }

  test::TemporaryFolder folder_;
  RunConfig config_;
  std::vector<std::vector<std::string>> text_;  // what train and valid were made of
};

TEST_F(StoreRun, IsTheRunOnTheText) {
  ASSERT_EQ(error_of(config_), "");
  EXPECT_FALSE(fs::exists(fs::path(config_.output.dir) / "tokens" / "train"));
  const auto loaded = infer::load_model(config_.output.dir, at::kCPU);
  EXPECT_EQ(eval::HeldOutText(loaded, {}).store().num_tokens(), 401);
  const auto state = test::final_state(config_);
  config_.output.dir += "-text";
  config_.data.train = text_[0];
  config_.data.valid = text_[1];
  ASSERT_EQ(error_of(config_), "");
  EXPECT_TRUE(test::final_state(config_) == state);
}

TEST_F(StoreRun, AnotherTokenizerIsRefused) {
  config_.data.tokenizer = "gpt2";
  config_.data.merges = 100;
  const std::string error = error_of(config_);
  EXPECT_TRUE(contains(error, "train-tokens holds tokens of another tokenizer than data.tokenizer = \"gpt2\""));
}

TEST_F(StoreRun, AModelOfAnotherTokenizerIsNotStartedFrom) {
  config_.data.train = text_[0];
  config_.data.valid = text_[1];
  ASSERT_EQ(error_of(config_), "");
  RunOptions options;
  options.init_from = config_.output.dir;
  config_.output.dir += "-next";
  config_.data.tokenizer = "gpt2";
  config_.data.merges = 0;  // the same ids
  EXPECT_EQ(run_training(config_, options), RunOutcome::kFinished);
  config_.output.dir += "-other";
  config_.data.merges = 1;
  EXPECT_THROW(run_training(config_, options), Error);
}

TEST_F(StoreRun, WhatIsInBothHalvesIsFound) {
  config_.data.valid = config_.data.train;
  EXPECT_TRUE(contains(error_of(config_), "both in data.train and in data.valid"));
  config_.data.valid = {text_[0][0] + "/1.txt"};
  EXPECT_TRUE(contains(error_of(config_), "both in data.train and in data.valid"));
  fs::copy_file(folder_.path() / "text" / "1.txt", folder_.path() / "copy.txt");
  config_.data.valid = {(folder_.path() / "copy.txt").string()};
  EXPECT_TRUE(contains(error_of(config_), "is a copy of"));
}

TEST_F(StoreRun, StandsAlone) {
  config_.data.train.push_back(text_[0][0]);
  EXPECT_TRUE(contains(error_of(config_), "no other source can stand beside it"));
  config_.data.train.pop_back();
  config_.data.valid.clear();
  config_.data.valid_fraction = 0.5;
  EXPECT_TRUE(contains(error_of(config_), "cannot split the token store"));
}

}  // namespace
}  // namespace fox::train
