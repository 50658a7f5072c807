#include "train/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace fox::train {
namespace {

// W = 100, T = 500: the cosine runs over 400 tokens, so that its quarters have closed forms.
const Schedule kSchedule{.peak = 8e-3, .minimum = 0, .warmup_tokens = 100, .max_tokens = 500};

TEST(Schedule, WarmsUpInAStraightLineFromZero) {
  EXPECT_EQ(kSchedule.at(0), 0);
  EXPECT_DOUBLE_EQ(kSchedule.at(25), 2e-3);
  EXPECT_DOUBLE_EQ(kSchedule.at(99), 8e-3 * 0.99);
}

TEST(Schedule, FallsAlongHalfACosine) {
  EXPECT_DOUBLE_EQ(kSchedule.at(100), 8e-3);
  EXPECT_DOUBLE_EQ(kSchedule.at(200), 4e-3 * (1 + std::sqrt(0.5)));  // cos(π/4)
  EXPECT_DOUBLE_EQ(kSchedule.at(300), 4e-3);                         // cos(π/2)
  EXPECT_DOUBLE_EQ(kSchedule.at(400), 4e-3 * (1 - std::sqrt(0.5)));
  EXPECT_EQ(kSchedule.at(500), 0);
}

TEST(Schedule, StaysAtItsMinimumAfterwards) {
  Schedule schedule = kSchedule;
  schedule.minimum = 1e-3;
  EXPECT_DOUBLE_EQ(schedule.at(100), 8e-3);
  EXPECT_DOUBLE_EQ(schedule.at(300), 4.5e-3);
  EXPECT_EQ(schedule.at(500), 1e-3);
  EXPECT_EQ(schedule.at(1'000'000'000'000), 1e-3);
}

TEST(Schedule, WorksWithoutWarmUpAndWithNothingElse) {
  EXPECT_EQ((Schedule{1e-3, 0, 0, 500}.at(0)), 1e-3);
  EXPECT_EQ((Schedule{1e-3, 1e-4, 500, 500}.at(499)), 1e-3 * 499 / 500);
  EXPECT_EQ((Schedule{1e-3, 1e-4, 500, 500}.at(500)), 1e-4);
}

// 760M / 16B of the published recipe: the numbers of the run, not of this code.
TEST(Schedule, CountsTokensBeyond32Bits) {
  const Schedule schedule{1e-3, 0, 268'435'456, 16'106'127'360};
  EXPECT_DOUBLE_EQ(schedule.at(268'435'456 + (16'106'127'360 - 268'435'456) / 2), 5e-4);
}

}  // namespace
}  // namespace fox::train
