#include "bench/train.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "bench/step_profile.h"
#include "config/published_models.h"
#include "support/ranks.h"

namespace fox::bench {
namespace {

TrainOptions small(const std::string& model) {
  return {.model = model, .size = "tiny", .length = 32, .precision = "float32", .steps = 2, .threads = 1};
}

// The first: ranks are made of this process while it has no threads.
TEST(TrainBench, RanksAreMeasuredTogether) {
  const auto ended = test::run_ranks(2, [](const dist::Launch& launch) {
    auto options = small("fox_pro");
    options.launch = launch;
    return to_json(bench_train(options));
  });
  test::expect_all_fine(ended);
  const auto line = nlohmann::json::parse(ended[0].said);
  EXPECT_EQ(line.at("ranks"), 2);
  EXPECT_GT(line.at("parts").at("communication"), 0);
  EXPECT_NEAR(line.at("tokens_per_s").get<double>() * line.at("ms").get<double>() / 1e3, 2 * 32, 1e-6);
}

// Time, speed and parts are one statement, for every model there is.
TEST(TrainBench, EveryModelIsMeasured) {
  for (const auto& model : published_models()) {
    const auto m = bench_train(small(model));
    EXPECT_GT(m.ms, 0) << model;
    EXPECT_NEAR(m.tokens_per_s * m.ms / 1e3, 32, 1e-6) << model;
    for (const char* part :
         {"attention", "recurrence", "matmul", "elementwise", "optimizer", "communication", "data", "idle"}) {
      ASSERT_TRUE(m.parts.contains(part)) << model << ", " << part;
      EXPECT_GE(m.parts.at(part), 0) << model << ", " << part;
    }
    EXPECT_GT(m.parts.at("matmul"), 0) << model;
    const bool recurrent = model == "mamba2" || model == "hgrn2" || model == "delta_net" || model == "samba";
    EXPECT_EQ(m.parts.at("recurrence") > 0, recurrent) << model;
    EXPECT_GT(m.parts.at("optimizer"), 0) << model;
    EXPECT_EQ(m.parts.at("communication"), 0) << model;
    EXPECT_GT(m.peak_gib, 0) << model;
  }
}

TEST(TrainBench, AttentionIsAPartOfItsOwn) {
  EXPECT_GT(bench_train(small("fox_pro")).parts.at("attention"), 0);
  EXPECT_EQ(bench_train(small("mamba2")).parts.at("attention"), 0);
}

TEST(TrainBench, GatesPruningAndAccumulationAreSaid) {
  auto options = small("fox_llama");
  options.gates = "log_spaced";
  options.prune = true;
  options.batch = 2;
  options.micro_batches = 3;
  options.activation_checkpointing = "full";
  const auto line = nlohmann::json::parse(to_json(bench_train(options)));
  EXPECT_EQ(line.at("gates"), "pruned");
  EXPECT_EQ(line.at("log_spaced"), true);
  EXPECT_EQ(line.at("B"), 2);
  EXPECT_EQ(line.at("micro_batches"), 3);
  EXPECT_NEAR(line.at("tokens_per_s").get<double>() * line.at("ms").get<double>() / 1e3, 2 * 3 * 32, 1e-6);
}

TEST(TrainBench, AJsonLineHasEveryKey) {
  const auto line = nlohmann::json::parse(to_json({.model = "fox_pro", .T = 5}));
  for (const char* key : {"model", "size", "gates", "T", "B", "ranks", "tokens_per_s", "mfu", "parts", "peak_gib"}) {
    EXPECT_TRUE(line.contains(key)) << key;
  }
}

TEST(TrainBench, RefusesWhatItDoesNotKnow) {
  auto options = small("fox_prp");
  EXPECT_THROW(bench_train(options), UsageError);
  options = small("fox_pro");
  options.size = "7b";
  EXPECT_THROW(bench_train(options), UsageError);
  options = small("transformer_llama");
  options.prune = true;
  EXPECT_THROW(bench_train(options), UsageError);
  options = small("fox_pro");
  options.gates = "open";
  EXPECT_THROW(bench_train(options), UsageError);
  options = small("fox_pro");
  options.activation_checkpointing = "some";
  EXPECT_THROW(bench_train(options), UsageError);
}

TEST(StepProfile, KnowsThePartsByTheirKernels) {
  EXPECT_EQ(part_of("void fox::cuda::(anonymous namespace)::states_kernel<64>(fox::cuda::(anonymous namespace)::Args)"),
            "recurrence");
  EXPECT_EQ(part_of("fox::hgrn2_scan_backward"), "recurrence");
  EXPECT_EQ(part_of("void fox::cuda::(anonymous namespace)::backward<…>(fox::cuda::ShortConvParams<…>, …)"),
            "elementwise");
  EXPECT_EQ(part_of("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"), "matmul");
  EXPECT_EQ(part_of("void fox::cuda::forgetting_attn_forward_kernel<…>(fox::cuda::ForwardArgs)"), "attention");
  EXPECT_EQ(part_of("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<…FusedAdam…>"), "optimizer");
  EXPECT_EQ(part_of("ncclDevKernel_AllReduce_Sum_bf16_RING_LL"), "communication");
  EXPECT_EQ(part_of("Memcpy HtoD (Pinned -> Device)"), "data");
  EXPECT_EQ(part_of("void at::native::vectorized_elementwise_kernel<…>"), "elementwise");
}

}  // namespace
}  // namespace fox::bench
