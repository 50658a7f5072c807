#include "eval/gates.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "eval/attention_map.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace fox::eval {
namespace {

class GatesTest : public ::testing::Test {
 protected:
  data::TokenStore make_store(int64_t bytes) {
    std::string text;
    while (static_cast<int64_t>(text.size()) < bytes) text += "so " + std::to_string(text.size() * 7919 % 1000) + "\n";
    const std::filesystem::path file = folder_.path() / "text.txt";
    std::ofstream(file) << text;
    return data::build_token_store({file}, tokenizer_, folder_.path() / "store");
  }
  test::TemporaryFolder folder_;
  data::Tokenizer tokenizer_ = test::byte_tokenizer();
};

/// Gates that do not depend on data: log f = ln σ(b) of each head, at all tokens. q and k are 0 if `no_logits`.
model::LanguageModel fixed_gates(const std::vector<double>& log_gates, bool no_logits) {
  ModelConfig config = test::tiny_config();
  config.num_hidden_layers = 1;
  config.num_heads = static_cast<int64_t>(log_gates.size());
  config.hidden_size = 8 * config.num_heads;
  config.fgate_type = GateType::kBiasOnly;
  config.qk_norm = false;
  model::LanguageModel model = test::make_model(config);
  for (const nn::Parameter& parameter : model.parameters()) {
    if (parameter.name.ends_with("fgate_bias")) {
      for (size_t h = 0; h < log_gates.size(); ++h) {
        parameter.tensor[h] = -std::log(std::expm1(-log_gates[h]));  // ln σ(b) = log_gate
      }
    }
    if (no_logits && parameter.name.find("q_proj") != std::string::npos) parameter.tensor.zero_();
  }
  return model;
}

TEST_F(GatesTest, MemoryLengthOfFixedGates) {
  const std::vector<double> log_gates = {-2, -0.1, -1.0 / 64, -1e-4};
  model::LanguageModel model = fixed_gates(log_gates, /*no_logits=*/true);
  const GateAnalysis got = analyse_gates(model, make_store(1300), tokenizer_, {.length = 512, .windows = 5});
  EXPECT_EQ(got.windows, 2);  // the text holds no more
  ASSERT_EQ(got.heads.size(), 4u);
  EXPECT_TRUE(got.has_gates);
  for (size_t h = 0; h < 4; ++h) {
    EXPECT_EQ(got.heads[h].layer, 0);
    EXPECT_EQ(got.heads[h].head, static_cast<int64_t>(h));
    EXPECT_NEAR(got.heads[h].mean_gate, std::exp(log_gates[h]), 1e-5);
    EXPECT_NEAR(*got.heads[h].memory_length, -1 / log_gates[h], -1e-3 / log_gates[h]);
  }
}

TEST_F(GatesTest, SkippedBlocksOfFixedGates) {
  // q = 0, so all logits are 0 and block (m, n), m > n, is skipped where the keys up to its end hold less than ε of the
  // first row i of query block m: Σ_{j<=e} exp(-c_j) / Σ_{j<=i} exp(-c_j), two geometric series.
  const std::vector<double> log_gates = {-2, -0.1, -1.0 / 64, -1e-4};
  const int64_t T = 512, blocks = T / 64;
  model::LanguageModel model = fixed_gates(log_gates, /*no_logits=*/true);
  const GateAnalysis got =
      analyse_gates(model, make_store(600), tokenizer_, {.length = T, .log_pruning_tolerance = -10});
  for (size_t h = 0; h < 4; ++h) {
    int64_t skipped = 0;
    for (int64_t m = 0; m < blocks; ++m) {
      for (int64_t n = 0; n < m; ++n) {
        const auto keys = static_cast<double>(64 * (n + 1)), seen = static_cast<double>(64 * m + 1);
        const double share = std::expm1(log_gates[h] * keys) / std::expm1(log_gates[h] * seen);
        skipped += std::exp(log_gates[h] * (seen - keys)) * share < std::exp(-10);
      }
    }
    EXPECT_DOUBLE_EQ(*got.heads[h].skipped_share, static_cast<double>(skipped) / (blocks * (blocks + 1) / 2)) << h;
  }
  EXPECT_DOUBLE_EQ(got.most_skippable, 21.0 / 36);  // all but the diagonal (8) and the blocks beside it (7)
  EXPECT_DOUBLE_EQ(*got.heads[0].skipped_share, got.most_skippable);
  EXPECT_EQ(*got.heads[3].skipped_share, 0);
}

TEST_F(GatesTest, DataDependentGatesAgreeWithTheNaiveModel) {
  ModelConfig config = test::tiny_config();
  config.num_hidden_layers = 1;
  model::LanguageModel model = test::make_model(config, at::kDouble);
  const data::TokenStore store = make_store(120);
  const GateAnalysis got = analyse_gates(model, store, tokenizer_, {.length = 100});
  std::vector<int32_t> ids(100);
  ids[0] = tokenizer_.end_of_text();
  store.read(0, std::span(ids).subspan(1));
  const naive::Weights w = test::weights_of(model);
  const at::Tensor x =
      w.at("model.embeddings.weight").index_select(0, at::tensor(std::vector<int64_t>(ids.begin(), ids.end())));
  const at::Tensor h = naive::rms_norm(x, w.at("model.layers.0.attn_norm.weight"), config.norm_eps);
  const at::Tensor log_f_TH = at::log_sigmoid(at::linear(h, w.at("model.layers.0.attn.fgate_proj.weight")) +
                                              w.at("model.layers.0.attn.fgate_proj.bias"));
  for (int64_t head = 0; head < 2; ++head) {
    EXPECT_NEAR(got.heads[head].mean_log_gate, log_f_TH.select(1, head).mean().item<double>(), 1e-9);
    EXPECT_NEAR(got.heads[head].mean_gate, log_f_TH.select(1, head).exp().mean().item<double>(), 1e-9);
  }
}

TEST_F(GatesTest, ModelsWithoutGates) {
  model::LanguageModel model = test::make_model(test::tiny_transformer_config());
  const GateAnalysis got =
      analyse_gates(model, make_store(200), tokenizer_, {.length = 128, .num_maps = 3, .map_size = 16});
  EXPECT_FALSE(got.has_gates);
  ASSERT_EQ(got.heads.size(), 4u);
  for (const HeadGates& head : got.heads) {
    EXPECT_EQ(head.mean_gate, 1);
    EXPECT_FALSE(head.memory_length || head.skipped_share);
  }
  ASSERT_EQ(got.maps.size(), 3u);
  EXPECT_TRUE(got.maps[0].forget.empty());
  EXPECT_EQ(got.maps[0].attention.size(), 16u);
  const nlohmann::json json = to_json(got);
  EXPECT_TRUE(json["heads"][0]["memory_length"].is_null());
  EXPECT_FALSE(json["has_gates"].get<bool>());
}

TEST_F(GatesTest, MapsAreSpreadOverMemoryLengths) {
  model::LanguageModel model = fixed_gates({-0.1, -2, -1e-4, -1.0 / 64}, /*no_logits=*/true);
  const GateAnalysis got =
      analyse_gates(model, make_store(200), tokenizer_, {.length = 128, .num_maps = 2, .map_size = 32});
  ASSERT_EQ(got.maps.size(), 2u);
  EXPECT_EQ(got.maps[0].head, 1);  // the shortest memory
  EXPECT_EQ(got.maps[1].head, 2);  // and the longest
  EXPECT_EQ(got.maps[0].scale, 4);
  EXPECT_EQ(analyse_gates(model, make_store(200), tokenizer_, {.length = 64, .num_maps = 99}).maps.size(), 4u);
}

TEST_F(GatesTest, RefusesShortTextAndBadOptions) {
  model::LanguageModel model = test::make_model(test::tiny_config());
  const data::TokenStore store = make_store(100);
  EXPECT_THROW(analyse_gates(model, store, tokenizer_, {.length = 1000}), Error);
  EXPECT_THROW(analyse_gates(model, store, tokenizer_, {.length = 0}), Error);
  EXPECT_THROW(analyse_gates(model, store, tokenizer_, {.length = 10, .windows = 0}), Error);
  EXPECT_THROW(analyse_gates(model, store, tokenizer_, {.length = 10, .log_pruning_tolerance = 5}), Error);
  EXPECT_THROW(analyse_gates(model, store, tokenizer_, {.length = 10, .num_maps = -1}), Error);
}

TEST(AttentionMap, UnpooledEqualsTheDefinition) {
  at::manual_seed(1);
  const int64_t T = 20;
  const at::Tensor q = at::randn({T, 8}), k = at::randn({T, 8}), log_f = -at::rand({T});
  for (const std::optional<int64_t> window : {std::optional<int64_t>(), std::optional<int64_t>(5)}) {
    const HeadMap map = attention_map(q, k, log_f, window, 64);
    EXPECT_EQ(map.scale, 1);
    for (int64_t i = 0; i < T; ++i) {
      ASSERT_EQ(map.forget[i].size(), static_cast<size_t>(i + 1));
      std::vector<double> weight(i + 1);
      double total = 0;
      for (int64_t j = 0; j <= i; ++j) {
        double d = 0;
        for (int64_t l = j + 1; l <= i; ++l) d += log_f[l].item<double>();
        EXPECT_NEAR(map.forget[i][j], std::exp(d), 1e-6);
        if (window && j <= i - *window) continue;
        weight[j] = std::exp((q[i] * k[j]).sum().item<double>() / std::sqrt(8.0) + d);
        total += weight[j];
      }
      for (int64_t j = 0; j <= i; ++j) EXPECT_NEAR(map.attention[i][j], weight[j] / total, 1e-6);
    }
  }
}

TEST(AttentionMap, PoolingAveragesForgettingAndKeepsRowsOfAttentionAtOne) {
  at::manual_seed(2);
  const int64_t T = 22;  // does not divide by the scale of 4: blocks of 4, the last of 2
  const at::Tensor q = at::randn({T, 4}), k = at::randn({T, 4}), log_f = -at::rand({T});
  const HeadMap whole = attention_map(q, k, log_f, {}, 64), pooled = attention_map(q, k, log_f, {}, 6);
  ASSERT_EQ(pooled.scale, 4);
  ASSERT_EQ(pooled.forget.size(), 6u);
  for (int64_t r = 0; r < 6; ++r) {
    double row = 0;
    for (int64_t c = 0; c <= r; ++c) {
      double forget = 0, attention = 0;
      int64_t entries = 0, rows = 0;
      for (int64_t i = 4 * r; i < std::min<int64_t>(4 * r + 4, T); ++i, ++rows) {
        for (int64_t j = 4 * c; j < std::min<int64_t>(4 * c + 4, i + 1); ++j, ++entries) {
          forget += whole.forget[i][j];
          attention += whole.attention[i][j];
        }
      }
      EXPECT_NEAR(pooled.forget[r][c], forget / static_cast<double>(entries), 1e-6);
      EXPECT_NEAR(pooled.attention[r][c], attention / static_cast<double>(rows), 1e-6);
      row += pooled.attention[r][c];
    }
    EXPECT_NEAR(row, 1, 1e-5);
  }
}

TEST(AttentionMap, HardResets) {
  at::Tensor log_f = at::full({6}, -0.5);
  log_f[3] = -INFINITY;
  const HeadMap map = attention_map(at::zeros({6, 4}), at::zeros({6, 4}), log_f, {}, 8);
  EXPECT_EQ(map.forget[4][2], 0);
  EXPECT_NEAR(map.forget[4][3], std::exp(-0.5), 1e-6);
  EXPECT_NEAR(map.attention[3][3], 1, 1e-6);
}

}  // namespace
}  // namespace fox::eval
