#include "infer/load_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/files.h"
#include "support/model_folder.h"
#include "support/sentence_piece_file.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace fox::infer {
namespace {

namespace fs = std::filesystem;

class LoadModelTest : public ::testing::Test {
 protected:
  /// `body` throws fox::Error whose message names `part`, with a hint.
  template <typename F>
  static void expect_error(F body, const std::string& part) {
    try {
      body();
      ADD_FAILURE() << "no error; expected one with '" << part << "'";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
      EXPECT_FALSE(error.hint().empty()) << error.what();
    }
  }

  void expect_same_logits(LoadedModel& loaded) {
    const at::Tensor ids = at::arange(20).unsqueeze(0);
    EXPECT_TRUE(at::equal(loaded.model.logits(ids), model_.logits(ids)));
  }

  test::TemporaryFolder folder_;
  fs::path dir_ = folder_.path() / "model";
  model::LanguageModel model_ = test::make_model(test::tiny_config());
  data::Tokenizer tokenizer_ = test::byte_tokenizer();
};

TEST_F(LoadModelTest, HuggingFaceDirectory) {
  test::write_model_folder(dir_, model_, tokenizer_);
  LoadedModel loaded = load_model(dir_);
  expect_same_logits(loaded);
  EXPECT_EQ(loaded.tokenizer.fingerprint(), tokenizer_.fingerprint());
  EXPECT_EQ(loaded.location.dir, dir_);
  EXPECT_FALSE(loaded.location.run_dir || loaded.location.tokens || loaded.location.train_context());
  EXPECT_TRUE(loaded.location.run_json().is_null());
}

TEST_F(LoadModelTest, SentencePieceModelBesideTheWeights) {
  test::write_text(folder_.path() / "x.model", test::SentencePieceFile().bytes());
  const data::Tokenizer tokenizer = data::Tokenizer::load(folder_.path() / "x.model");
  test::write_model_folder(dir_, model_, tokenizer);
  LoadedModel loaded = load_model(dir_);
  expect_same_logits(loaded);
  EXPECT_EQ(loaded.tokenizer.fingerprint(), tokenizer.fingerprint());
  test::write_text(dir_ / "tokenizer.model", "damaged");
  expect_error([&] { load_model(dir_); }, "tokenizer.model is no SentencePiece model");
}

TEST_F(LoadModelTest, RunDirectoryStandsForItsNewestCompleteCheckpoint) {
  model::LanguageModel older = test::make_model(test::tiny_transformer_config());
  test::write_run(dir_, older, tokenizer_, 64, 900);
  test::write_run(dir_, model_, tokenizer_, 64, 1000);
  // Neither a checkpoint that is being written nor one that was cut off in the middle counts.
  test::write_model_folder(dir_ / "checkpoints" / ".writing-tokens-000000000003000", older, tokenizer_);
  test::write_run(dir_, older, tokenizer_, 64, 2000);
  fs::resize_file(dir_ / "checkpoints" / "tokens-000000000002000" / "model.safetensors", 100);
  LoadedModel loaded = load_model(dir_);
  expect_same_logits(loaded);
  EXPECT_EQ(loaded.location.tokens, 1000);
  EXPECT_EQ(loaded.location.run_dir, dir_);
  EXPECT_EQ(loaded.location.train_context(), 64);
}

TEST_F(LoadModelTest, DamagedCheckpointsAreNotUsed) {
  test::write_run(dir_, model_, tokenizer_, 64, 1000);
  const fs::path checkpoint = dir_ / "checkpoints" / "tokens-000000000001000";
  EXPECT_NO_THROW(load_model(checkpoint));
  test::write_text(checkpoint / "config.json", read_file(checkpoint / "config.json") + " ");
  expect_error([&] { load_model(checkpoint); }, "config.json does not have its checksum");
  expect_error([&] { load_model(dir_); }, "none of the checkpoints");
  fs::remove(checkpoint / "checksums.json");
  EXPECT_NO_THROW(load_model(checkpoint)) << "a model directory like any other";
}

TEST_F(LoadModelTest, ADamagedRunJsonIsNamed) {
  test::write_run(dir_, model_, tokenizer_, 64, 1000);
  for (const char* text : {"{", "[]", "{\"config\": 1}"}) {
    test::write_text(dir_ / "run.json", text);
    expect_error([&] { locate_model(dir_).train_context(); }, "run.json is damaged");
  }
}

TEST_F(LoadModelTest, CheckpointFolderKnowsItsRun) {
  test::write_run(dir_, model_, tokenizer_, 64, 1000);
  const ModelLocation location = locate_model(dir_ / "checkpoints" / "tokens-000000000001000" / "");
  EXPECT_EQ(location.tokens, 1000);
  ASSERT_TRUE(location.run_dir);
  EXPECT_TRUE(fs::equivalent(*location.run_dir, dir_));
  // Copied elsewhere it is a model directory like any other.
  fs::copy(dir_ / "checkpoints" / "tokens-000000000001000", folder_.path() / "copy");
  EXPECT_FALSE(locate_model(folder_.path() / "copy").run_dir);
}

TEST_F(LoadModelTest, NamesWhatIsMissing) {
  expect_error([&] { load_model(dir_); }, dir_.string());
  fs::create_directories(dir_);
  expect_error([&] { load_model(dir_); }, "holds no model");
  fs::create_directories(dir_ / "checkpoints");
  expect_error([&] { load_model(dir_); }, "no complete checkpoint");
  test::write_model_folder(dir_, model_, tokenizer_);
  expect_error([&] { load_model(dir_ / "config.json"); }, "is a file");
  fs::remove(dir_ / "tokenizer.json");
  expect_error([&] { load_model(dir_); }, "tokenizer.json");
  test::write_model_folder(dir_, model_, tokenizer_);
  fs::remove(dir_ / "model.safetensors");
  expect_error([&] { load_model(dir_); }, "has no weights");
}

TEST_F(LoadModelTest, NamesWhatIsDamaged) {
  test::write_model_folder(dir_, model_, tokenizer_);
  test::write_text(dir_ / "config.json", "{");
  expect_error([&] { load_model(dir_); }, "config.json");
  test::write_model_folder(dir_, model_, tokenizer_);
  test::write_text(dir_ / "tokenizer.json", "[1]");
  expect_error([&] { load_model(dir_); }, "tokenizer.json");
  test::write_model_folder(dir_, model_, tokenizer_);
  fs::resize_file(dir_ / "model.safetensors", fs::file_size(dir_ / "model.safetensors") - 4);
  expect_error([&] { load_model(dir_); }, "model.safetensors");
  // Missing and misshapen tensors, all in one message.
  test::write_model_folder(dir_, model_, tokenizer_);
  checkpoint::NamedTensors weights = test::named_weights(model_);
  weights.erase("model.norm.weight");
  weights["lm_head.weight"] = at::zeros({3, 3});
  weights["model.stranger"] = at::zeros({1});
  checkpoint::write_safetensors(dir_ / "model.safetensors", weights);
  for (const char* name : {"model.norm.weight", "lm_head.weight", "model.stranger"}) {
    expect_error([&] { load_model(dir_); }, name);
  }
}

TEST_F(LoadModelTest, TokenizerMustFitTheModel) {
  test::write_model_folder(dir_, model_, data::Tokenizer::gpt2(100));
  expect_error([&] { load_model(dir_); }, "357");
}

TEST_F(LoadModelTest, TiedEmbeddingsNeedNoHead) {
  ModelConfig config = test::tiny_config();
  config.tie_word_embeddings = true;
  const model::LanguageModel tied = test::make_model(config);
  test::write_model_folder(dir_, tied, tokenizer_);
  EXPECT_NO_THROW(load_model(dir_));
}

}  // namespace
}  // namespace fox::infer
