#include "bench/elementwise.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"

namespace fox::bench {
namespace {

ElementwiseOptions small() {
  return {.rows = {32, 48}, .widths = {64}, .head_dim = 16, .vocab = 100, .repetitions = 2};
}

TEST(ElementwiseBench, EveryOperatorInEveryDirectionAtEverySize) {
  std::set<std::string> seen, heads;
  bench_elementwise(small(), [&](const ElementwiseMeasurement& m) {
    EXPECT_GT(m.ms, 0);
    EXPECT_GE(m.ms_spread, 0);
    EXPECT_EQ(m.dtype, "float32");
    if (m.vocab > 0) {
      heads.insert(m.op + " " + m.direction);
      EXPECT_EQ(m.rows, 48);
      return;
    }
    EXPECT_NEAR(m.ratio * m.copy_gb_per_s / m.gb_per_s, 1, 1e-9);
    // Everything is float32 here, so bytes come in rows of 4 · width, but for weights and numbers a head.
    const double passes = m.gb_per_s * m.ms * 1e6 / (4.0 * m.rows * m.width);
    if (m.op == "rms_norm") {
      EXPECT_NEAR(passes, m.direction == "forward" ? 2 : 3, 0.2);
    }
    if (m.op == "short_conv" || m.op == "short_conv by ATen") {
      EXPECT_NEAR(passes, m.direction == "forward" ? 2 : 3, 0.5) << m.op;
    }
    if (m.op == "add_rms_norm") {
      EXPECT_NEAR(passes, 4, 0.2) << m.direction;
    }
    EXPECT_TRUE(seen.insert(m.op + " " + m.direction + " " + std::to_string(m.rows)).second);
  });
  for (const char* op : {"rms_norm", "rms_norm per head", "add_rms_norm", "gated_rms_norm", "token_shift",
                         "attn_input norm", "attn_input shift norm", "attn_input shift norm rotary", "short_conv",
                         "short_conv by ATen", "hgrn2_gate", "time_step", "swiglu of two", "swiglu"}) {
    for (const char* direction : {" forward", " backward"}) {
      for (const char* rows : {" 32", " 48"}) EXPECT_TRUE(seen.contains(op + std::string(direction) + rows)) << op;
    }
  }
  EXPECT_TRUE(seen.contains("rotary forward 32"));
  EXPECT_EQ(heads, std::set<std::string>{"linear_cross_entropy forward_backward"});
}

TEST(ElementwiseBench, JsonLinesHaveTheirKeys) {
  const auto line = nlohmann::json::parse(to_json({.op = "rms_norm", .direction = "forward", .rows = 5, .ms = 1.5}));
  for (const char* key :
       {"op", "direction", "dtype", "rows", "width", "ms", "ms_spread", "gb_per_s", "copy_gb_per_s", "ratio"}) {
    EXPECT_TRUE(line.contains(key)) << key;
  }
  EXPECT_EQ(line["rows"], 5);
  EXPECT_EQ(line["ms"], 1.5);
  const auto head = nlohmann::json::parse(to_json({.op = "linear_cross_entropy", .vocab = 9, .extra_mib = 2}));
  EXPECT_EQ(head["vocab"], 9);
  EXPECT_EQ(head["extra_mib"], 2);
  EXPECT_FALSE(head.contains("gb_per_s"));
}

TEST(ElementwiseBench, RefusesWhatItDoesNotKnow) {
  const auto refuses = [](const ElementwiseOptions& options) {
    EXPECT_THROW(bench_elementwise(options, [](const auto&) {}), Error);
  };
  auto options = small();
  options.dtype = "float8";
  refuses(options);
  options = small();
  options.repetitions = 0;
  refuses(options);
  options = small();
  options.head_dim = 48;
  refuses(options);
}

}  // namespace
}  // namespace fox::bench
