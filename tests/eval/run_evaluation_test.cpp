#include "eval/run_evaluation.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/files.h"
#include "support/model_folder.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace fox::eval {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string some_text(int64_t bytes) {
  std::string text;
  for (int64_t i = 0; static_cast<int64_t>(text.size()) < bytes; ++i)
    text += "Rut1:" + std::to_string(i) + " Now it came\n";
  return text;
}

class RunEvaluationTest : public ::testing::Test {
 protected:
  RunEvaluationTest() {
    test::write_run(dir_, model_, tokenizer_, 16, 1000);
    test::write_text(text_, some_text(400));
    options_.loss = {.max_tokens = 100, .first_word = true, .progress = false};
    options_.gates.num_maps = 2;
    options_.samples.max_tokens = 10;
    options_.samples.stop_at_end_of_text = false;
  }

  json file(const std::string& name) { return json::parse(read_file(dir_ / "eval" / name)); }

  test::TemporaryFolder folder_;
  fs::path dir_ = folder_.path() / "run", text_ = folder_.path() / "held out.txt";
  model::LanguageModel model_ = test::make_model(test::tiny_config());
  data::Tokenizer tokenizer_ = test::byte_tokenizer();
  RunEvaluationOptions options_;
};

TEST_F(RunEvaluationTest, WritesWhatAReportNeeds) {
  options_.data = {text_};
  const RunEvaluation made = evaluate_run(dir_, options_);
  EXPECT_EQ(file("loss.json"), made.loss);
  EXPECT_EQ(file("gates.json"), made.gates);
  EXPECT_EQ(file("samples.json"), made.samples);
  const json& per_token = made.loss["per_token"];
  EXPECT_EQ(per_token["length"], 64);  // 4 training lengths
  EXPECT_EQ(per_token["stride"], 16);  // 32 does not divide the training length
  EXPECT_EQ(per_token["train_context"], 16);
  EXPECT_EQ(per_token["tokens"], 96);
  EXPECT_EQ(per_token["bins"].size(), 4u);  // 0-16-32-48-64
  EXPECT_EQ(per_token["bins"][0]["difference"], 0);
  EXPECT_TRUE(per_token["bins"][3]["first_word_accuracy"].is_number());
  EXPECT_EQ(made.loss["held_out"]["context"], 16);
  EXPECT_EQ(made.loss["held_out"]["bytes"], fs::file_size(text_));
  EXPECT_EQ(made.gates["length"], 64);
  EXPECT_EQ(made.gates["heads"].size(), 4u);
  EXPECT_EQ(made.gates["maps"].size(), 2u);
  ASSERT_EQ(made.samples["samples"].size(), 1u);
  EXPECT_EQ(made.samples["samples"][0]["prompt"], "Rut1:0 Now it came\n");
  EXPECT_EQ(made.samples["samples"][0]["tokens"], 10);
  EXPECT_EQ(made.loss["made_from"]["checkpoint"], "tokens-000000000001000");
  EXPECT_EQ(made.loss["made_from"]["trained_tokens"], 1000);
}

TEST_F(RunEvaluationTest, RepeatsOnlyWhatHasChanged) {
  options_.data = {text_};
  evaluate_run(dir_, options_);
  const fs::path loss = dir_ / "eval" / "loss.json", gates = dir_ / "eval" / "gates.json";
  const auto mark = [](const fs::path& path) {
    json marked = json::parse(read_file(path));
    marked["old"] = true;
    write_file_atomically(path, marked.dump());
  };
  const auto is_old = [](const json& j) { return j.contains("old"); };
  const auto evaluate_marked = [&] {
    mark(loss);
    mark(gates);
    return evaluate_run(dir_, options_);
  };
  RunEvaluation made = evaluate_marked();
  EXPECT_TRUE(is_old(made.loss) && is_old(made.gates));
  options_.loss.max_tokens = 50;
  made = evaluate_marked();
  EXPECT_TRUE(!is_old(made.loss) && is_old(made.gates));
  test::write_text(text_, some_text(500));
  made = evaluate_marked();
  EXPECT_TRUE(!is_old(made.loss) && !is_old(made.gates));
  test::write_run(dir_, model_, tokenizer_, 16, 2000);
  made = evaluate_marked();
  EXPECT_TRUE(!is_old(made.loss) && !is_old(made.gates));
  options_.compute = at::kBFloat16;
  const json exact = made.loss["per_token"];
  made = evaluate_marked();
  EXPECT_TRUE(!is_old(made.loss) && !is_old(made.gates) && !is_old(made.samples));
  EXPECT_EQ(made.loss["made_from"]["precision"], "bf16");
  EXPECT_NE(made.loss["per_token"]["loss"], exact["loss"]);  // computed so, not only called so
  EXPECT_NEAR(made.loss["per_token"]["bins"][0]["loss"].get<double>(), exact["bins"][0]["loss"].get<double>(), 0.02);
  options_.force = true;
  made = evaluate_marked();
  EXPECT_TRUE(!is_old(made.loss) && !is_old(made.gates));
  options_.force = false;
  write_file_atomically(loss, "{ not json");
  EXPECT_TRUE(evaluate_run(dir_, options_).loss.contains("per_token"));
}

TEST_F(RunEvaluationTest, ReadsTheRunsOwnHeldOutText) {
  EXPECT_THROW(evaluate_run(dir_, options_), Error);  // there is none
  data::build_token_store({text_}, tokenizer_, dir_ / "tokens" / "valid");
  const RunEvaluation own = evaluate_run(dir_, options_);
  options_.data = {text_};
  EXPECT_EQ(evaluate_run(dir_, options_).loss["per_token"], own.loss["per_token"]);
  // A store can be named like a text.
  options_.data = {dir_ / "tokens" / "valid"};
  EXPECT_EQ(evaluate_run(dir_, options_).loss["per_token"], own.loss["per_token"]);
}

TEST_F(RunEvaluationTest, RefusesAnotherTokenizersStoreAndMissingText) {
  data::build_token_store({text_}, data::Tokenizer::gpt2(10), folder_.path() / "other");
  options_.data = {folder_.path() / "other"};
  EXPECT_THROW(evaluate_run(dir_, options_), Error);
  options_.data = {folder_.path() / "missing.txt"};
  EXPECT_THROW(evaluate_run(dir_, options_), Error);
}

TEST_F(RunEvaluationTest, OptionsAreCheckedBeforeAnythingIsComputed) {
  options_.data = {text_};
  const infer::ModelLocation location = infer::locate_model(dir_);
  EXPECT_NO_THROW(check_evaluation(location, options_));
  const auto refuses = [&](const std::function<void(RunEvaluationOptions&)>& change) {
    RunEvaluationOptions options = options_;
    change(options);
    EXPECT_THROW(check_evaluation(location, options), Error);
  };
  refuses([](auto& o) { o.loss.stride = 7; });
  refuses([](auto& o) { o.gates.num_maps = -1; });
  refuses([](auto& o) { o.gates.log_pruning_tolerance = 1; });
  refuses([](auto& o) { o.data = {"absent.txt"}; });
  refuses([](auto& o) { o.data.clear(); });  // the run has none of its own
  refuses([](auto& o) { o.samples.max_tokens = -1; });
  refuses([](auto& o) { o.samples.sampling.temperature = -5; });
  test::write_text(dir_ / "eval", "no folder");
  refuses([](auto&) {});
}

TEST_F(RunEvaluationTest, NeedsARunDirectory) {
  test::write_model_folder(folder_.path() / "model", model_, tokenizer_);
  options_.data = {text_};
  EXPECT_THROW(evaluate_run(folder_.path() / "model", options_), Error);
  // Without a run the training length is unknown, so a length must be given.
  const infer::ModelLocation location = infer::locate_model(folder_.path() / "model");
  PerTokenLossOptions loss;
  EXPECT_THROW(default_loss_options(location, loss), Error);
  loss.length = 96;
  default_loss_options(location, loss);
  EXPECT_EQ(loss.stride, 32);
}

}  // namespace
}  // namespace fox::eval
