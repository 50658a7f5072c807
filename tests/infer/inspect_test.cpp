#include "infer/inspect.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "support/model_folder.h"
#include "support/temporary_folder.h"
#include "support/tiny_model.h"

namespace fox::infer {
namespace {

TEST(Inspect, PartsAddUpToTheModel) {
  for (const ModelConfig& config : {test::tiny_config(), test::tiny_transformer_config()}) {
    const ModelSummary summary = summarise_model(config, 128);
    int64_t parameters = 0;
    double flops = 0;
    for (const ModelPart& part : summary.parts) {
      parameters += part.parameters;
      flops += part.flops_per_token;
    }
    EXPECT_EQ(parameters, summary.parameters.total);
    EXPECT_DOUBLE_EQ(flops, summary.flops_per_token);
    EXPECT_EQ(summary.parameters.total - summary.parameters.non_embedding, config.vocab_size * config.hidden_size);
  }
}

TEST(Inspect, PublishedTable) {
  // FoX (Pro) 760M at 16,384 tokens: arXiv 2503.02130, Table 6 (2.72e9 as printed, truncated).
  ModelConfig config = test::tiny_config();
  config.vocab_size = 50257;
  config.hidden_size = 1536;
  config.num_hidden_layers = 24;
  config.num_heads = 24;
  config.intermediate_size.reset();
  config.hidden_ratio = 3.5;
  config.qk_norm_share_param_across_head = true;
  const ModelSummary summary = summarise_model(config, 16384);
  EXPECT_EQ(summary.parameters.non_embedding, 759441984);
  EXPECT_NEAR(summary.flops_per_token, 2.0 * 759441984 + 2.0 * 24 * 1536 * 16384, 1);
  const auto part = [&](const std::string& name) {
    for (const ModelPart& p : summary.parts) {
      if (p.name == name) return p;
    }
    ADD_FAILURE() << "no part " << name;
    return ModelPart();
  };
  EXPECT_EQ(part("attn.q_proj").parameters, 24LL * 1536 * 1536);
  EXPECT_EQ(part("attn.fgate_proj").parameters, 24LL * (1536 * 24 + 24));
  EXPECT_EQ(part("embeddings").parameters, 50257LL * 1536);
  EXPECT_EQ(part("embeddings").flops_per_token, 0);
  EXPECT_EQ(part("lm_head").flops_per_token, 2.0 * 50257 * 1536);
  EXPECT_EQ(part("mixing of tokens").flops_per_token, 2.0 * 24 * 1536 * 16384);
}

TEST(Inspect, ContextIsTheTrainingLengthUnlessGiven) {
  const test::TemporaryFolder folder;
  const model::LanguageModel model = test::make_model(test::tiny_config());
  test::write_run(folder.path() / "run", model, test::byte_tokenizer(), 64, 1000);
  test::write_model_folder(folder.path() / "model", model, test::byte_tokenizer());
  EXPECT_EQ(summarise_model(folder.path() / "run").context, 64);
  EXPECT_EQ(summarise_model(folder.path() / "run", 500).context, 500);
  EXPECT_EQ(summarise_model(folder.path() / "model").context, 16384);
  EXPECT_THROW(summarise_model(folder.path() / "model", 0), Error);
  const nlohmann::json json = to_json(summarise_model(folder.path() / "run"));
  EXPECT_EQ(json["trained_tokens"], 1000);
  EXPECT_EQ(json["config"]["hidden_size"], 16);
}

}  // namespace
}  // namespace fox::infer
