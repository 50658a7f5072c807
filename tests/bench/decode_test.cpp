#include "bench/decode.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace fox::bench {
namespace {

TEST(DecodeBench, EveryContenderRunsAndItsNumbersAgree) {
  std::vector<DecodeMeasurement> lines;
  bench_decode({.device = "cpu", .sizes = {{200, 2}}, .heads = 2, .head_dim = 16, .repetitions = 2},
               [&](const DecodeMeasurement& m) { lines.push_back(m); });
  ASSERT_EQ(lines.size(), 4u);
  for (const auto& m : lines) {
    EXPECT_GT(m.ms, 0);
    EXPECT_NEAR(m.tb_per_s * m.ms * 1e9 / (2.0 * 4 * m.kept * 2 * 200 * 2 * 16), 1, 1e-9);
  }
  EXPECT_DOUBLE_EQ(lines[0].ratio, 1);
  EXPECT_TRUE(lines[3].pruned);
}

TEST(DecodeBench, AJsonLineHasEveryKey) {
  const auto line = nlohmann::json::parse(to_json(DecodeMeasurement{.op = "sdpa", .T = 5, .ms = 1.5}));
  for (const char* key : {"op", "direction", "gates", "pruned", "kernel", "dtype", "B", "T", "H", "D", "ms",
                          "ms_spread", "tb_per_s", "ratio", "kept"}) {
    EXPECT_TRUE(line.contains(key)) << key;
  }
}

TEST(DecodeBench, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(bench_decode({.device = "cpu", .dtype = "float8"}, [](const auto&) {}), Error);
  EXPECT_THROW(bench_decode({.device = "cpu", .sizes = {{0, 1}}}, [](const auto&) {}), Error);
}

}  // namespace
}  // namespace fox::bench
