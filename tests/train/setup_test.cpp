#include "train/setup.h"

#include <gtest/gtest.h>

namespace fox::train {
namespace {

TEST(CudaGraph, IsForStepsThatLaunchingHoldsUp) {
  ModelConfig config;
  config.vocab_size = 256;
  config.hidden_size = 128;
  config.num_hidden_layers = 4;
  config.num_heads = 2;
  const model::LanguageModel model(config);
  EXPECT_TRUE(repeats_steps("auto", model, 256, 1024));
  EXPECT_FALSE(repeats_steps("auto", model, 256, int64_t{1} << 24));
  for (const int64_t tokens : {int64_t{1024}, int64_t{1} << 24}) {
    EXPECT_TRUE(repeats_steps("on", model, 256, tokens));
    EXPECT_FALSE(repeats_steps("off", model, 256, tokens));
  }
}

}  // namespace
}  // namespace fox::train
