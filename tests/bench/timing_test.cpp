#include "bench/timing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

namespace fox::bench {
namespace {

// The values are numpy.quantile's.
TEST(Timing, QuantilesLieBetweenNeighbours) {
  EXPECT_DOUBLE_EQ(quantile({7}, 0.25), 7);
  EXPECT_DOUBLE_EQ(quantile({4, 1, 3, 2}, 0.25), 1.75);
  EXPECT_DOUBLE_EQ(quantile({4, 1, 3, 2}, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(quantile({10, -1, 0.5, 3, 8, 2}, 0.75), 6.75);
  const Summary s = summarise({10, -1, 0.5, 3, 8, 2});
  EXPECT_DOUBLE_EQ(s.median, 2.5);
  EXPECT_DOUBLE_EQ(s.spread, 6.75 - 0.875);
}

// A clock that wanders by 20 % between rounds, and a contender that takes 3 % more in each: within rounds that is seen
// exactly, while the times themselves are spread.
TEST(Timing, QuotientsOfARoundDoNotSeeItsClock) {
  std::mt19937 generator(1);
  std::uniform_real_distribution<double> clock(0.8, 1.0);
  std::vector<double> base, other;
  for (int round = 0; round < 31; ++round) {
    const double ms = 2 / clock(generator);
    base.push_back(ms), other.push_back(1.03 * ms);
  }
  const Summary cost = summarise(quotients(other, base));
  EXPECT_NEAR(cost.median, 1.03, 1e-12);
  EXPECT_NEAR(cost.spread, 0, 1e-12);
  EXPECT_GT(summarise(base).spread, 0.1);
}

TEST(Timing, ARoundRunsInItsOrderAndAnswersByIndex) {
  std::vector<size_t> ran;
  const auto work = [&](size_t i, int sleep_ms) {
    return [&ran, i, sleep_ms] {
      ran.push_back(i);
      std::this_thread::sleep_for(std::chrono::milliseconds(sleep_ms));
    };
  };
  const std::vector<Work> works{{work(0, 8)}, {work(1, 0), 3}, {work(2, 4)}};
  const auto ms = time_round(c10::kCPU, works, {2, 0, 1});
  EXPECT_EQ(ran, (std::vector<size_t>{2, 0, 1, 1, 1}));
  ASSERT_EQ(ms.size(), 3u);
  EXPECT_GE(ms[0], 8);
  EXPECT_GE(ms[2], 4);
  EXPECT_LT(ms[1], 4);  // of a call, not of all three
}

TEST(Timing, EveryTurnHasAnOrderOfItsOwn) {
  std::vector<std::vector<size_t>> orders;
  for (int64_t turn = 0; turn < 8; ++turn) {
    orders.push_back(order_of_turn(6, turn));
    EXPECT_EQ(orders.back(), order_of_turn(6, turn));
    auto sorted = orders.back();
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(sorted, (std::vector<size_t>{0, 1, 2, 3, 4, 5}));
  }
  std::sort(orders.begin(), orders.end());
  EXPECT_GE(std::unique(orders.begin(), orders.end()) - orders.begin(), 7);
}

TEST(Timing, WarmingUpTellsWhatARoundCosts) {
  int ran = 0;
  const double ms = warm_up(c10::kCPU, [&] {
    ++ran;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  });
  EXPECT_EQ(ran, 1);
  EXPECT_GE(ms, 20);
  EXPECT_LT(ms, 1000);
}

TEST(Timing, RoundsFillTheirTimeWithinBounds) {
  EXPECT_EQ(rounds_within(10, 250), 40);
  EXPECT_EQ(rounds_within(10, 1), 100);
  EXPECT_EQ(rounds_within(10, 0), 100);
  EXPECT_EQ(rounds_within(10, 60000), 5);
}

}  // namespace
}  // namespace fox::bench
