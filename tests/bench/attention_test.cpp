#include "bench/attention.h"

#include <gtest/gtest.h>

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
    EXPECT_GT(m.kept, 0);
    EXPECT_LE(m.kept, 1);
    if (m.op == "sdpa") {
      EXPECT_DOUBLE_EQ(m.ratio, 1);
    }
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
  for (const char* key : {"op", "direction", "gates", "pruned", "kernel", "dtype", "B", "T", "H", "D", "ms",
                          "ms_spread", "tflops", "ratio", "kept"}) {
    EXPECT_TRUE(line.contains(key)) << key;
  }
  EXPECT_EQ(line["T"], 5);
  EXPECT_EQ(line["ms"], 1.5);
}

TEST(AttentionBench, RefusesWhatItDoesNotKnow) {
  auto options = small();
  options.dtype = "float8";
  EXPECT_THROW(bench_attention(options, [](const auto&) {}), Error);
  options = small();
  options.repetitions = 0;
  EXPECT_THROW(bench_attention(options, [](const auto&) {}), Error);
}

}  // namespace
}  // namespace fox::bench
