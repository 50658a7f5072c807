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

TEST(CudaGraph, IsMissedWhereItWasAskedForInVain) {
  const auto said = [](const char* cuda_graph, at::Device device, int ranks) {
    testing::internal::CaptureStderr();
    warn_of_idle_graph(cuda_graph, device, ranks);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_TRUE(said("on", at::kCPU, 1).starts_with("warning: cuda_graph = \"on\" has no effect on a CPU"));
  EXPECT_TRUE(said("on", at::kCUDA, 2).starts_with("warning: cuda_graph = \"on\" has no effect among several ranks"));
  EXPECT_EQ(said("on", at::kCUDA, 1) + said("auto", at::kCPU, 1) + said("off", at::kCPU, 2), "");
}

}  // namespace
}  // namespace fox::train
