#include "ops/rotary.h"
#include "ops/rotary_table.h"

#include <atomic>
#include <cmath>
#include <thread>

#include "support/op_check.h"

namespace fox::test {
namespace {

Op ours(double base, int64_t offset) {
  return [=](const Tensors& t) { return ops::rotary(t[0], base, offset); };
}
Op reference(double base, int64_t offset) {
  return [=](const Tensors& t) { return ops::rotary_reference(t[0], base, offset); };
}
at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

TEST(Rotary, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const int64_t dim : {2, 6, 24, 64, 128}) {
        for (const int64_t offset : {0, 5, 300}) {
          expect_as_good_as_reference(ours(1e4, offset), reference(1e4, offset), {random({2, 7, 3, dim})}, type, path);
        }
      }
    }
  });
}

// float32 angles are off by 0.06 at a million; ours are float64, also beyond the tables that are kept.
TEST(Rotary, FarPositionsKeepTheirAngles) {
  for (const int64_t position : {100000LL, 1000000LL, 1LL << 20, 3000000LL, 1LL << 40}) {
    const auto y = ops::rotary(at::tensor({1.0F, 1.0F, 0.0F, 0.0F}).view({1, 1, 1, 4}), 5e5, position).flatten();
    for (int64_t i = 0; i < 2; ++i) {
      const double angle = static_cast<double>(position) * std::pow(5e5, -2.0 * static_cast<double>(i) / 4);
      EXPECT_NEAR(y[i].item<double>(), std::cos(angle), 2e-4 * (position > (1LL << 30)) + 1e-6) << position;
      EXPECT_NEAR(y[i + 2].item<double>(), std::sin(angle), 2e-4 * (position > (1LL << 30)) + 1e-6) << position;
    }
  }
}

TEST(Rotary, DependsOnDistanceAlone) {
  at::manual_seed(2);
  const auto q = random({1, 1, 1, 16}), k = random({1, 1, 1, 16});
  const auto score = [&](int64_t i, int64_t j) {
    return (ops::rotary(q, 1e4, i) * ops::rotary(k, 1e4, j)).sum().item<double>();
  };
  EXPECT_NEAR(score(9, 4), score(1009, 1004), 1e-10);
}

TEST(Rotary, TokenByTokenEqualsOnePass) {
  at::manual_seed(3);
  const auto x = at::randn({2, 40, 2, 8});
  const auto whole = ops::rotary(x, 1e4);
  for (const int64_t t : {0, 1, 17, 39})
    EXPECT_TRUE(at::equal(ops::rotary(x.narrow(1, t, 1), 1e4, t), whole.narrow(1, t, 1)));
}

TEST(Rotary, ReadsAnyStrides) {
  at::manual_seed(4);
  expect_as_good_as_reference(ours(1e4, 0), reference(1e4, 0),
                              {random({2, 6, 48}).narrow(2, 16, 16).view({2, 6, 2, 8})}, at::kFloat,
                              "packed projection");
  expect_as_good_as_reference(ours(1e4, 0), reference(1e4, 0), {random({2, 2, 6, 8}).transpose(1, 2)}, at::kFloat,
                              "heads first");
  expect_as_good_as_reference(ours(1e4, 0), reference(1e4, 0), {random({2, 6, 8, 2}).transpose(2, 3)}, at::kFloat,
                              "D-strided");
}

TEST(Rotary, GradientsMatchFiniteDifferences) {
  at::manual_seed(5);
  expect_gradients_match_differences(ours(100, 3), {random({1, 3, 2, 6})}, "rotary");
}

TEST(Rotary, SeveralThreadsShareTheTables) {
  const auto x = at::randn({1, 4, 1, 10});
  const auto expected = ops::rotary_reference(x, 777, 4000);
  std::vector<std::thread> threads;
  std::atomic<int> good = 0;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const at::NoGradGuard no_grad;
      for (int64_t offset = i; offset < 4000; offset += 97) ops::rotary(x, 777, offset);
      good += static_cast<int>(at::allclose(ops::rotary(x, 777, 4000), expected, 1e-5, 1e-6));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(good, 4);
}

TEST(Rotary, MetaErrorsAndSecondDerivative) {
  expect_meta_agrees(ours(1e4, 2), {at::randn({1, 2, 3, 4}, at::kHalf)});
  expect_double_backward_refused(ours(1e4, 0), {at::randn({1, 2, 3, 4})});
  expect_error([] { ops::rotary(at::randn({1, 2, 3, 5}), 1e4); }, {"x has shape (1, 2, 3, 5)", "even"});
  expect_error([] { ops::rotary(at::randn({2, 3, 4}), 1e4); }, {"(B, T, H, D)"});
  expect_error([] { ops::rotary(at::randn({1, 2, 3, 4}), -1); }, {"base is -1"});
  expect_error([] { ops::rotary(at::randn({1, 2, 3, 4}), 1e4, -3); }, {"offset -3"});
}

// What a CUDA graph has recorded goes on reading the table that was there then.
TEST(RotaryTable, StaysWhereItIsWhenALongerOneIsMade) {
  const auto first = ops::rotary_table(16, 24, 123.0, 0, at::kFloat).cos;
  const auto copy = first.clone();
  const auto before = first.storage().use_count();
  const auto second = ops::rotary_table(100000, 24, 123.0, 0, at::kFloat).cos;
  EXPECT_FALSE(second.is_alias_of(first));
  EXPECT_EQ(first.storage().use_count(), before);
  EXPECT_TRUE(at::equal(first, copy));
  EXPECT_TRUE(at::equal(second.narrow(0, 0, 16), copy));
}

}  // namespace
}  // namespace fox::test
