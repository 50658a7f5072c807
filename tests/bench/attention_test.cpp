#include "bench/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"

namespace fox::bench {
namespace {

AttentionOptions small() { return {.lengths = {64, 200}, .heads = 2, .head_dim = 16, .repetitions = 3}; }

TEST(AttentionBench, EveryContenderRunsInEveryDirectionAtEveryLength) {
  std::set<std::string> seen;
  bench_attention(small(), [&](const AttentionMeasurement& m) {
    EXPECT_GT(m.ms, 0);
    EXPECT_GE(m.ms_spread, 0);
    EXPECT_EQ(m.rounds, 3);
    EXPECT_GE(m.ratio_spread, 0);
    EXPECT_GT(m.kept, 0);
    EXPECT_LE(m.kept, 1);
    if (m.op == "sdpa") {
      EXPECT_DOUBLE_EQ(m.ratio, 1);
      EXPECT_DOUBLE_EQ(m.ratio_spread, 0);
    }
    // Of our operator, dense, with gates, and of nothing else.
    const bool has_cost = m.op == "forgetting_attn" && m.gates != "off" && !m.pruned;
    EXPECT_EQ(std::isfinite(m.gate_cost), has_cost) << m.op << " " << m.gates;
    EXPECT_EQ(m.gate_cost_spread >= 0, has_cost);
    // Speed, time and FLOPs are one statement.
    const double passes = m.direction == "forward" ? 1 : m.direction == "backward" ? 2.5 : 3.5;
    EXPECT_NEAR(m.tflops * m.ms * 1e9 / (passes * 2 * 2 * m.T * m.T * 16), 1, 1e-9);
    EXPECT_TRUE(seen.insert(m.op + m.direction + m.gates + (m.pruned ? "pruned" : "") + std::to_string(m.T)).second);
  });
  EXPECT_EQ(seen.size(), 6u * 3u * 2u);
}

TEST(AttentionBench, WithoutPruningEverythingIsKept) {
  auto options = small();
  options.prune = false;
  bench_attention(options, [](const AttentionMeasurement& m) {
    EXPECT_FALSE(m.pruned);
    EXPECT_EQ(m.kept, 1);
  });
}

TEST(AttentionBench, AJsonLineHasEveryKey) {
  const auto line = nlohmann::json::parse(to_json({.op = "sdpa", .direction = "forward", .T = 5, .ms = 1.5}));
  for (const char* key : {"op", "direction", "gates", "pruned", "kernel", "dtype", "B", "T", "H", "D", "ms", "rounds",
                          "ms_spread", "tflops", "ratio", "ratio_spread", "gate_cost", "gate_cost_spread", "kept"}) {
    EXPECT_TRUE(line.contains(key)) << key;
  }
  EXPECT_EQ(line["T"], 5);
  EXPECT_EQ(line["ms"], 1.5);
  EXPECT_TRUE(line["gate_cost"].is_null());
}

TEST(AttentionBench, RefusesWhatItDoesNotKnow) {
  auto options = small();
  options.dtype = "float8";
  EXPECT_THROW(bench_attention(options, [](const auto&) {}), Error);
  options = small();
  options.repetitions = -1;
  EXPECT_THROW(bench_attention(options, [](const auto&) {}), Error);
  options = small();
  options.seconds = 0;
  EXPECT_THROW(bench_attention(options, [](const auto&) {}), Error);
}

TEST(AttentionBench, ALengthTakesAsManyRoundsAsFitItsTime) {
  auto options = small();
  options.lengths = {64}, options.prune = false, options.repetitions = 0;
  for (const double seconds : {1e-6, 60.}) {  // at least 5; some milliseconds a round would be far more than 100
    options.seconds = seconds;
    bench_attention(options, [&](const AttentionMeasurement& m) { EXPECT_EQ(m.rounds, seconds < 1 ? 5 : 100); });
  }
}

}  // namespace
}  // namespace fox::bench
