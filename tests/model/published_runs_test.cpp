// The run files under configs/ and the published models: what they say and how many parameters that makes.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "config/published_models.h"
#include "config/run_config.h"
#include "model/language_model.h"

namespace fox::model {
namespace {

namespace fs = std::filesystem;

/// Parameters without the input embedding, "model size" → N. The 760M column is table 6 of arXiv 2503.02130 (759M,
/// 757M, …), the others follow from its formulas; Samba's and the sliding window's were published without a count.
const std::map<std::string, int64_t> kParameters{
    {"fox_pro 125m", 123893904},
    {"fox_pro 360m", 367293824},
    {"fox_pro 760m", 759441984},
    {"transformer_pro 125m", 123783168},
    {"transformer_pro 360m", 366900224},
    {"transformer_pro 760m", 757675008},
    {"fox_llama 125m", 123661968},
    {"fox_llama 360m", 360188288},
    {"fox_llama 760m", 757632576},
    {"transformer_llama 125m", 123551232},
    {"transformer_llama 360m", 359794688},
    {"transformer_llama 760m", 756747264},
    {"hgrn2 125m", 123569664},
    {"hgrn2 360m", 359843840},
    {"hgrn2 760m", 756820992},
    {"delta_net 125m", 123718656},
    {"delta_net 360m", 360289280},
    {"delta_net 760m", 757635072},
    {"mamba2 125m", 128965824},
    {"mamba2 360m", 368314880},
    {"mamba2 760m", 780113664},
    {"transformer_swa 760m", 756747264},
};

TEST(PublishedModels, HaveTheirPublishedSizes) {
  for (const auto& [name, expected] : kParameters) {
    const size_t space = name.find(' ');
    const LanguageModel model(published_model(name.substr(0, space), name.substr(space + 1)));
    EXPECT_EQ(model.count_parameters().non_embedding, expected) << name;
  }
  const auto samba = LanguageModel(published_model("samba", "760m")).count_parameters().non_embedding;
  EXPECT_NEAR(static_cast<double>(samba), 760e6, 10e6);
}

TEST(PublishedModels, AWrongNameIsAnsweredWithTheNearest) {
  try {
    published_model("fox_prp", "125m");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(error.hint().find("fox_pro"), std::string::npos) << error.hint();
  }
}

std::vector<fs::path> run_files() {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(FOX_SOURCE_DIR) / "configs")) {
    if (entry.path().extension() == ".toml") files.push_back(entry.path());
  }
  return files;
}

TEST(RunFiles, AllAreReadAndReadBackTheSame) {
  ASSERT_GE(run_files().size(), 33u);
  for (const auto& file : run_files()) {
    const RunConfig config = RunConfig::load(file);
    EXPECT_FALSE(config.to_toml().empty()) << file;
    EXPECT_EQ(config.train.batch_tokens % config.train.micro_batch_tokens, 0) << file;
  }
}

struct Budget {
  int64_t max_tokens, steps;
};
const std::map<std::string, Budget> kBudgets{{"2.7b", {2684354560, 5120}},
                                             {"7.5b", {7516192768, 14336}},
                                             {"16b", {16106127360, 30720}},
                                             {"48b", {48318382080, 92160}}};

// configs/longcrawl64/MODEL_SIZE_BUDGET.toml holds that model, and the recipe of tables 4 and 5.
TEST(RunFiles, OfThePaperHoldThePublishedModelAndRecipe) {
  std::map<std::string, std::set<std::string>> sizes_of;
  for (const auto& file : run_files()) {
    if (file.parent_path().filename() != "longcrawl64") continue;
    const std::string name = file.stem().string();
    const size_t second = name.rfind('_'), first = name.rfind('_', second - 1);
    const std::string model = name.substr(0, first), size = name.substr(first + 1, second - first - 1);
    sizes_of[model].insert(name.substr(first + 1));
    const RunConfig config = RunConfig::load(file);
    EXPECT_EQ(config.model.to_json(), published_model(model, size).to_json()) << name;

    const Budget& budget = kBudgets.at(name.substr(second + 1));
    EXPECT_EQ(config.train.max_tokens, budget.max_tokens) << name;
    EXPECT_EQ(config.train.batch_tokens * budget.steps, budget.max_tokens) << name;
    EXPECT_EQ(config.train.warmup_tokens, int64_t{1} << 28) << name;
    EXPECT_EQ(config.data.context, 16384) << name;
    if (budget.steps < 92160) {
      EXPECT_EQ(config.train.lr, size == "760m" ? 1e-3 : 2e-3) << name;
    }
    EXPECT_EQ(config.train.min_lr, 0) << name;
    EXPECT_EQ(config.train.beta2, 0.95) << name;
    EXPECT_EQ(config.train.weight_decay, 0.1) << name;
    EXPECT_EQ(config.train.precision, "bf16") << name;
  }
  const std::set<std::string> all{"125m_2.7b", "360m_7.5b", "760m_16b", "760m_48b"}, one{"760m_16b"};
  for (const auto& model : published_models()) {
    EXPECT_EQ(sizes_of[model], model == "transformer_swa" || model == "samba" ? one : all) << model;
  }
}

// The rates that the paper found best at 48B tokens.
TEST(RunFiles, OfThePaperAt48BUseTheirOwnRates) {
  for (const auto& [model, lr] : std::map<std::string, double>{{"fox_pro", 2e-3},
                                                               {"transformer_pro", 1e-3},
                                                               {"fox_llama", 1e-3},
                                                               {"transformer_llama", 5e-4},
                                                               {"mamba2", 2e-3},
                                                               {"hgrn2", 2e-3},
                                                               {"delta_net", 1e-3}}) {
    const auto file = fs::path(FOX_SOURCE_DIR) / "configs/longcrawl64" / (model + "_760m_48b.toml");
    EXPECT_EQ(RunConfig::load(file).train.lr, lr) << model;
  }
}

}  // namespace
}  // namespace fox::model
