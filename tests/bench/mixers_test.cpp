#include "bench/mixers.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "support/op_check.h"

namespace fox::bench {
namespace {

MixersOptions small() {
  return {.lengths = {64, 200}, .positions = {5, 70}, .tokens = 128, .width = 128, .repetitions = 2};
}

TEST(MixersBench, EveryMixerRunsInEveryDirectionAtEveryLengthAndPosition) {
  std::set<std::string> seen;
  bench_mixers(small(), [&](const MixersMeasurement& m) {
    EXPECT_GT(m.ms, 0);
    EXPECT_GE(m.ms_spread, 0);
    EXPECT_EQ(m.width, 128);
    const bool decodes = m.direction == "decode";
    EXPECT_EQ(m.B, !decodes && m.T == 64 ? 2 : 1);
    EXPECT_NEAR(m.tokens_per_s * m.ms / 1e3, decodes ? 1 : m.B * m.T, 1e-6);
    EXPECT_TRUE(seen.insert(m.op + m.direction + std::to_string(m.T)).second);
  });
  EXPECT_EQ(seen.size(), 5u * (2u * 2u + 2u));
}

// Speed, time and FLOPs are one statement: HGRN2's four products of a chunk are 64 × 128 × (2 × 64 + 2 × 128) × 2.
TEST(MixersBench, GflopsAreThoseOfTheChunksProducts) {
  auto options = small();
  options.lengths = {128}, options.positions = {1};
  bench_mixers(options, [](const MixersMeasurement& m) {
    if (m.op != "hgrn2" || m.direction == "decode") return;
    const double passes = m.direction == "forward" ? 1 : 3;
    EXPECT_NEAR(m.gflops * m.ms * 1e6 / (passes * 2 * 2 * 64 * 128 * (2 * 64 + 2 * 128)), 1, 1e-9);
    EXPECT_NEAR(m.ratio, m.gflops / m.matmul_gflops, 1e-9);
  });
}

TEST(MixersBench, WhatARecurrenceRemembersDoesNotGrow) {
  std::map<std::string, std::set<int64_t>> bytes;
  bench_mixers(small(), [&](const MixersMeasurement& m) {
    if (m.direction == "decode" && m.op != "forgetting_attn") bytes[m.op].insert(m.cache_bytes);
  });
  EXPECT_EQ(bytes.size(), 4u);
  for (const auto& [op, sizes] : bytes) {
    EXPECT_EQ(sizes.size(), 1u) << op;
    EXPECT_GT(*sizes.begin(), 0) << op;
  }
}

TEST(MixersBench, AJsonLineHasEveryKey) {
  const auto line = nlohmann::json::parse(to_json({.op = "mamba2", .T = 5, .ms = 1.5}));
  for (const char* key : {"op", "direction", "dtype", "B", "T", "width", "H", "K", "V", "ms", "ms_spread",
                          "tokens_per_s", "gflops", "matmul_gflops", "ratio", "peak_mib", "cache_bytes"}) {
    EXPECT_TRUE(line.contains(key)) << key;
  }
  EXPECT_EQ(line["T"], 5);
}

TEST(MixersBench, WhatWasNotMeasuredIsNoNumber) {
  const std::string row = table_row({.op = "mamba", .T = 5, .ms = 1.5, .tokens_per_s = 10, .ratio = 0.5});
  EXPECT_TRUE(row.ends_with("         –  0.50x         –")) << row;
}

TEST(MixersBench, RefusesWhatItDoesNotKnow) {
  const auto refuses = [](const std::function<void(MixersOptions&)>& change, const std::vector<std::string>& parts) {
    auto options = small();
    change(options);
    test::expect_error([&] { bench_mixers(options, [](const auto&) {}); }, parts);
  };
  refuses([](auto& o) { o.dtype = "float8"; }, {"float8", "bfloat16"});
  refuses([](auto& o) { o.width = 100; }, {"width is 100", "multiple of 128"});
  refuses([](auto& o) { o.repetitions = 0; }, {"repetitions is 0"});
  refuses([](auto& o) { o.lengths = {0}; }, {"length 0"});
}

}  // namespace
}  // namespace fox::bench
