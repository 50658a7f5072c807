#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

// How far computed values are from expected ones, and how far they may be.
namespace fox::test {

/// The largest difference and the L2 norm of the difference, each relative to that of `expected`.
struct Distance {
  double max = 0, l2 = 0;
};

inline Distance distance(const at::Tensor& got, const at::Tensor& expected) {
  const auto a = got.detach().to(at::kDouble), b = expected.detach().to(at::kDouble);
  if (b.numel() == 0) return {};
  constexpr double kTiny = 1e-30;  // 0 expected and 0 computed are no distance apart
  return {(a - b).abs().max().item<double>() / std::max(b.abs().max().item<double>(), kTiny),
          (a - b).norm().item<double>() / std::max(b.norm().item<double>(), kTiny)};
}

/// Relative to the expected values, or below `absolute` everywhere (values that are 0 but for rounding).
inline void expect_close(const at::Tensor& got, const at::Tensor& expected, double relative, double absolute,
                         const std::string& what) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  const auto d = distance(got, expected);
  const double largest = (got.detach().to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  EXPECT_TRUE((d.max <= relative && d.l2 <= relative) || largest <= absolute)
      << what << ": relative error " << d.max << " (max), " << d.l2 << " (L2), absolute " << largest;
}

/// The rule for a fast path: at most twice as far from float64 as the naive computation in the same precision, and a
/// few units in the last place of the largest value. `relative` and `absolute` allow for rounding that only the fast
/// path does; whoever passes them says why.
inline void expect_as_good_as_naive(const at::Tensor& got, const at::Tensor& naive, const at::Tensor& expected,
                                    const std::string& what, double relative = 0, double absolute = 0) {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  const double eps =
      got.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const auto ours = distance(got, expected), theirs = distance(naive, expected);
  const double largest = (got.detach().to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  const double allowed = 4 * eps + relative;
  const bool fine = ours.max <= 2 * theirs.max + allowed && ours.l2 <= 2 * theirs.l2 + allowed;
  EXPECT_TRUE(fine || largest <= std::max(eps, absolute))
      << what << ": relative error " << ours.max << " (max), " << ours.l2 << " (L2), absolute " << largest << "; naive "
      << theirs.max << ", " << theirs.l2;
}

}  // namespace fox::test
