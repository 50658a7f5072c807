#include "config/run_config.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "base/error.h"
#include "base/files.h"
#include "support/temporary_folder.h"

namespace fox {
namespace {

const std::string kRun = R"([model]
hidden_size = 96
num_heads = 4
num_hidden_layers = 2
hidden_ratio = 4

[data]
train = ["corpus/train", "more.txt"]
valid = "corpus/valid"
merges = 768
context = 256

[train]
max_tokens = 1.6e6
batch_tokens = 1024
lr = 5e-3

[output]
dir = "runs/a \"b\" \\ c"
)";

class RunConfigTest : public ::testing::Test {
 protected:
  RunConfig load(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    std::ofstream(file_) << text;
    return RunConfig::load(file_, overrides);
  }
  /// The error for `text` and overrides, without the path of the file.
  std::string complaint(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    try {
      load(text, overrides);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), 2) << error.what();
      std::string what = error.what();
      const std::string dir = folder_.path().string() + "/";
      while (what.find(dir) != std::string::npos) what.erase(what.find(dir), dir.size());
      return what + (error.hint().empty() ? "" : " | " + error.hint());
    }
    return "no error";
  }
  static std::string with(const std::string& old, const std::string& replacement) {
    std::string text = kRun;
    text.replace(text.find(old), old.size(), replacement);
    return text;
  }

  test::TemporaryFolder folder_;
  std::filesystem::path file_ = folder_.path() / "run.toml";
};

TEST_F(RunConfigTest, ReadsEveryTableAndFillsDefaults) {
  const RunConfig config = load(kRun);
  EXPECT_EQ(config.model.hidden_size, 96);
  EXPECT_EQ(config.model.vocab_size, 0) << "left to the tokenizer";
  EXPECT_EQ(config.data.train, (std::vector<std::string>{"corpus/train", "more.txt"}));
  EXPECT_EQ(config.data.valid, std::vector<std::string>{"corpus/valid"});
  EXPECT_EQ(config.data.merges, 768);
  EXPECT_EQ(config.train.max_tokens, 1'600'000);
  EXPECT_EQ(config.train.micro_batch_tokens, 1024);
  EXPECT_EQ(config.train.lr, 5e-3);
  EXPECT_EQ(config.output.dir, "runs/a \"b\" \\ c");
  EXPECT_EQ(load(with("batch_tokens = 1024", "")).train.batch_tokens, 256);
}

TEST_F(RunConfigTest, PrintedConfigurationReadsBackTheSame) {
  for (const std::vector<std::string>& overrides : std::vector<std::vector<std::string>>{
           {},
           {"train.lr=1e-8", "train.seed=9223372036854775807", "train.max_grad_norm=1"},
           {"model.model_type=transformer-project_fox", "model.vocab_size=1025", "output.tensorboard=false"},
           {"data.train=[\"\xC3\xA9\\t\\u0001.txt\"]", "eval.sample_prompt=Gen1:1 #x"},
           {"model.fgate_bias_init=true", "model.decay_time_min=2", "model.decay_time_max=256.5"}}) {
    const RunConfig config = load(kRun, overrides);
    const RunConfig again = load(config.to_toml());
    EXPECT_EQ(again.to_json(), config.to_json()) << config.to_toml();
    EXPECT_EQ(again.to_toml(), config.to_toml());
  }
}

// A table within a table (Samba's attn, with a null in it) survives the way through TOML.
TEST_F(RunConfigTest, TablesWithinTablesReadBackTheSame) {
  const std::string rest = kRun.substr(kRun.find("[data]"));
  for (const std::string model :
       {"model_type = \"samba-project_fox\"\nhidden_size = 96\nattn = { num_heads = 4, window_size = 64 }\n",
        "model_type = \"samba-project_fox\"\n"}) {
    const RunConfig config = load("[model]\n" + model + rest);
    EXPECT_EQ(load(config.to_toml()).to_json(), config.to_json()) << config.to_toml();
  }
}

TEST_F(RunConfigTest, OverridesApplyInOrder) {
  const auto set = [&](std::vector<std::string> overrides) { return load(kRun, overrides); };
  EXPECT_EQ(set({"train.lr=0.25", "train.lr=0.5"}).train.lr, 0.5);
  EXPECT_EQ(set({"train.max_tokens=2e6"}).train.max_tokens, 2'000'000);
  EXPECT_EQ(set({"data.train=a.txt"}).data.train, std::vector<std::string>{"a.txt"});
  EXPECT_EQ(set({"data.train=['a.txt', 'b.txt']"}).data.train, (std::vector<std::string>{"a.txt", "b.txt"}));
  EXPECT_EQ(set({"eval.sample_prompt=In the = beginning"}).eval.sample_prompt, "In the = beginning");
  EXPECT_EQ(set({"eval.sample_prompt=\"quo\\ted\""}).eval.sample_prompt, "quo\ted");
  EXPECT_EQ(set({"eval.sample_prompt="}).eval.sample_prompt, "");
  EXPECT_EQ(set({"eval.sample_prompt=1\nx = 2"}).eval.sample_prompt, "1\nx = 2");
  EXPECT_FALSE(set({"output.tensorboard=false"}).output.tensorboard);
  EXPECT_EQ(set({"model.use_k_shift=true"}).model.use_k_shift, true);
}

TEST_F(RunConfigTest, LongCrawl64IsOneArrayAndItsTokenizer) {
  const std::vector<std::string> good{"data.format=longcrawl64", "data.train=train.zarr", "data.tokenizer=gpt2-json"};
  const std::string run = with("merges = 768", "");
  const auto with_also = [&](const std::string& change) { return complaint(run, {good[0], good[1], good[2], change}); };
  EXPECT_EQ(load(run, {good[0], good[1], good[2]}).data.format, "longcrawl64");
  EXPECT_NE(with_also("data.train=['a', 'b']").find("'data.train' names 2 arrays"), std::string::npos);
  EXPECT_NE(with_also("data.valid=['a', 'b']").find("'data.valid' names 2 arrays"), std::string::npos);
  EXPECT_NE(with_also("data.valid_fraction=0.1").find("'data.valid_fraction' splits text"), std::string::npos);
  EXPECT_NE(with_also("data.tokenizer=gpt2").find("set data.tokenizer = \"gpt2-json\""), std::string::npos);
  EXPECT_NE(with_also("data.format=longcrawl").find("longcrawl64"), std::string::npos);
}

TEST_F(RunConfigTest, ModelMayComeFromAFile) {
  std::ofstream(folder_.path() / "model.json") << R"({"hidden_size": 64, "num_heads": 2, "vocab_size": 500})";
  const std::string rest = kRun.substr(kRun.find("[data]"));
  const RunConfig config = load("[model]\nconfig = \"model.json\"\nnum_heads = 4\n" + rest);
  EXPECT_EQ(config.model.hidden_size, 64);
  EXPECT_EQ(config.model.num_heads, 4);
  EXPECT_EQ(config.model.vocab_size, 500);
  EXPECT_EQ(
      complaint("[model]\nconfig = \"model.json\"\nnum_heads = 3\n" + rest),
      "run.toml:3: [model]: 'num_heads' = 3 does not divide hidden_size = 64 | the heads share the width equally");
  std::ofstream(folder_.path() / "model.json") << R"({"hiden_size": 64})";
  EXPECT_EQ(complaint("[model]\nconfig = \"model.json\"\n" + rest),
            "model.json: 'hiden_size' is not a known key | did you mean 'hidden_size'?");
  std::ofstream(folder_.path() / "model.json") << "{";
  EXPECT_EQ(complaint("[model]\nconfig = \"model.json\"\n" + rest),
            "model.json is no JSON object | name a model's config.json");
  EXPECT_EQ(complaint("[model]\nconfig = \"none.json\"\n" + rest).substr(0, 21), "cannot read none.json");
}

TEST_F(RunConfigTest, EveryMistakeNamesItsKeyAndLine) {
  EXPECT_EQ(complaint(with("lr = 5e-3", "lrr = 5e-3")),
            "run.toml:16: 'train.lrr' is not a known key | did you mean 'lr'?");
  EXPECT_EQ(complaint(with("[output]", "[outptu]")),
            "run.toml:18: 'outptu' is not a known key | did you mean 'output'?");
  EXPECT_EQ(complaint(with("[train]", "[training]")),
            "run.toml:13: 'training' is not a known key | known: data, eval, model, output, train");
  EXPECT_EQ(complaint(with("dir = ", "keep_last = 2 # ")),
            "run.toml: 'output.dir' is missing | for example: dir = \"runs/first\"");
  EXPECT_EQ(complaint(kRun + "[evl]\n"), "run.toml:20: 'evl' is not a known key | did you mean 'eval'?");
  EXPECT_EQ(complaint(with("hidden_size", "hiden_size")),
            "run.toml:2: [model]: 'hiden_size' is not a known key | did you mean 'hidden_size'?");
  EXPECT_EQ(complaint(with("lr = 5e-3", "lr = \"fast\"")),
            "run.toml:16: 'train.lr' must be a number, not \"fast\" | written like 0.1 or 1e-3, without quotes");
  EXPECT_EQ(complaint(with("lr = 5e-3", "lr = -1")),
            "run.toml:16: 'train.lr' must be at least 0, not -1 | left out, it is 0.001");
  EXPECT_EQ(complaint(with("lr = 5e-3", "lr = inf")), "run.toml:16: 'train.lr' must be finite | give a finite number");
  EXPECT_EQ(complaint(with("lr = 5e-3", "lr = 2020-01-01")),
            "run.toml:16: 'train.lr' cannot be a date or a time | give a number, a string, true or false");
  EXPECT_EQ(complaint(with("context = 256", "context = 2.5")),
            "run.toml:11: 'data.context' must be a whole number, not 2.5 | written like 4, without quotes");
  EXPECT_EQ(
      complaint(with("context = 256", "context = 200")),
      "run.toml:15: 'train.batch_tokens' = 1024 is no multiple of data.context = 200 | the nearest are 1000 and 1200");
  EXPECT_EQ(complaint(with("context = 256", "context = 2048")),
            "run.toml:15: 'train.batch_tokens' = 1024 is no multiple of data.context = 2048 | the smallest is 2048");
  EXPECT_EQ(complaint(with("merges = 768", "tokenizer = \"bytes\"\nmerges = 768")),
            "run.toml:11: 'data.merges' cannot be chosen for the tokenizer \"bytes\" | only \"gpt2\" has merges to "
            "choose from");
  EXPECT_EQ(complaint(with("max_tokens = 1.6e6", "")),
            "run.toml: 'train.max_tokens' is missing | the number of tokens to train on");
  EXPECT_EQ(complaint(with("train = [\"corpus/train\", \"more.txt\"]", "")),
            "run.toml: 'data.train' names no text | for example: train = [\"corpus/train\"]");
  EXPECT_EQ(complaint(kRun, {"train.precision=fp32"}),
            "--set train.precision=fp32: 'train.precision' cannot be \"fp32\" | known: float32, bf16, float64");
  EXPECT_EQ(
      complaint(kRun, {"train.micro_batch_tokens=768"}),
      "--set train.micro_batch_tokens=768: 'train.micro_batch_tokens' = 768 does not divide train.batch_tokens = 1024"
      " | a step is a whole number of forward passes");
  EXPECT_EQ(
      complaint(kRun, {"train.sequence_ranks=3"}),
      "--set train.sequence_ranks=3: 'train.sequence_ranks' = 3 cannot hold contexts of data.context = 256 tokens "
      "together | each takes two equal chunks: data.context must be a multiple of 6");
  EXPECT_EQ(complaint(kRun, {"trian.lr=1"}), "--set trian.lr=1: 'trian' is not a known key | did you mean 'train'?");
  EXPECT_EQ(complaint(kRun, {"train.warmup_tokens=2e6"}),
            "--set train.warmup_tokens=2e6: 'train.warmup_tokens' = 2000000 is above train.max_tokens = 1600000 | the "
            "warm-up is a part of the training");
  for (const char* no_assignment : {"train.lr", "lr=1", "train=1", "", "=", ".="}) {
    EXPECT_NE(complaint(kRun, {no_assignment}), "no error") << no_assignment;
  }
  EXPECT_EQ(complaint(kRun, {"data.train=[\"a"}).substr(0, 24), "--set data.train=[\"a: Er");
}

TEST_F(RunConfigTest, TextThatIsNoTomlTellsTheLine) {
  EXPECT_EQ(complaint(with("lr = 5e-3", "lr = ")).substr(0, 12), "run.toml:16:");
  EXPECT_EQ(complaint(kRun + "[train]\n").substr(0, 12), "run.toml:20:");
  EXPECT_NE(complaint("\xFF\xFE"), "no error");
  try {
    RunConfig::load(folder_.path() / "missing.toml");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), 1);
  }
}

// Whatever stands in a run file, it is read or refused.
TEST_F(RunConfigTest, DamagedFilesAreRefusedOrWork) {
  std::mt19937 random(5);
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string text = kRun;
    for (size_t n = 1 + random() % 3; n > 0; --n) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, random() % 10);
          break;
        case 2:
          text.insert(at, text.substr(random() % text.size(), random() % 20));
          break;
        default:
          text[at] = "[]{}=\"'.\n#,-0e"[random() % 14];
      }
    }
    try {
      load(load(text).to_toml());
    } catch (const Error&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_LT(refused, 2000);
}

}  // namespace
}  // namespace fox
