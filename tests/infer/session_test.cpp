#include "infer/session.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "support/tiny_model.h"

namespace fox::infer {
namespace {

std::vector<int32_t> some_ids(int64_t n) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < n; ++i) ids.push_back(static_cast<int32_t>((i * i + 7 * i) % 251));
  return ids;
}

ModelConfig sliding_window_config() {
  ModelConfig config = test::tiny_transformer_config();
  config.window_size = 5;
  return config;
}

/// Logits (T, V) of one forward pass without a cache.
at::Tensor full_forward(model::LanguageModel& model, const std::vector<int32_t>& ids) {
  return model.logits(at::tensor(std::vector<int64_t>(ids.begin(), ids.end())).unsqueeze(0))[0];
}

TEST(Session, GivesWhatOneForwardPassGives) {
  const std::vector<int32_t> ids = some_ids(12);
  for (const ModelConfig& config : {test::tiny_config(), test::tiny_transformer_config(), sliding_window_config()}) {
    model::LanguageModel model = test::make_model(config, at::kDouble);
    const at::Tensor expected_TV = full_forward(model, ids);
    for (const auto& [chunk, prompt] : {std::pair(12, 12), {7, 12}, {1, 12}, {5, 11}, {1024, 1}}) {
      Session session(model, chunk);
      at::Tensor logits_V = session.prefill(std::span(ids).first(prompt));
      for (int64_t t = prompt - 1;; ++t) {
        EXPECT_LT((logits_V - expected_TV[t]).abs().max().item<double>(), 1e-5)
            << config.model_type << ", chunks of " << chunk << ", token " << t;
        EXPECT_EQ(session.length(), t + 1);
        if (t + 1 == static_cast<int64_t>(ids.size())) break;
        logits_V = session.step(ids[t + 1]);
      }
    }
  }
}

TEST(Session, LogitsAreFloatOnTheCpu) {
  model::LanguageModel model = test::make_model(test::tiny_config(), at::kDouble);
  const at::Tensor logits_V = Session(model).prefill(some_ids(3));
  EXPECT_EQ(logits_V.scalar_type(), at::kFloat);
  EXPECT_EQ(logits_V.sizes(), at::IntArrayRef({257}));
}

TEST(Session, NamesIdsOutsideTheVocabulary) {
  model::LanguageModel model = test::make_model(test::tiny_config());
  Session session(model);
  for (int32_t bad : {-1, 257, 70000}) {
    try {
      session.prefill(std::vector<int32_t>{1, bad});
      ADD_FAILURE() << bad << " was accepted";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(std::to_string(bad)), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(session.prefill({}), Error);
  EXPECT_EQ(session.length(), 0);
}

}  // namespace
}  // namespace fox::infer
