// Forgetting attention on the CPU against the naive reference in float64, for every case and instruction set.
#include "ops/forgetting_attn.h"

#include <gtest/gtest.h>

#include "cases/forgetting_attn_cases.h"
#include "kernels/cpu/simd.h"
#include "ops/forgetting_attn_run.h"

namespace fox {
namespace {

using cases::ForgettingAttnCase;
using cases::make_tensors;
using testing_support::Results;
using testing_support::run_op;
using testing_support::run_reference;

/// err(ours against float64) <= 2 err(naive in the same precision) + a few roundings of the largest value.
void expect_as_good(const Results& ours, const Results& naive, const Results& exact, double rounding,
                    double prefix_rounding) {
  for (size_t i = 0; i < exact.size(); ++i) {
    const auto& [name, want] = exact[i];
    if (want.numel() == 0) continue;
    ASSERT_EQ(ours[i].second.sizes(), want.sizes()) << name;
    // Rows that see nothing have a log-sum-exp of -inf on both sides.
    const auto finite = want.isfinite();
    EXPECT_TRUE(at::equal(ours[i].second.isfinite(), finite)) << name;
    const auto error = [&, &want = want](const at::Tensor& got) {
      return (got.to(at::kDouble) - want).masked_fill(finite.logical_not(), 0.0).abs().max().item<double>();
    };
    const double size = want.masked_fill(finite.logical_not(), 0.0).abs().max().item<double>();
    EXPECT_LE(error(ours[i].second), 2 * error(naive[i].second) + rounding * (size + 0.1) + prefix_rounding * size)
        << name;
  }
}

/// Both sides sum gates in float64: after hard resets of -1e4 the differences of those sums have lost some digits.
double prefix_rounding(const cases::ForgettingAttnTensors& x) {
  if (!x.log_f) return 0;
  const auto gates = x.log_f->to(at::kDouble);
  return 4e-16 * gates.masked_fill(gates.isinf(), 0.0).sum(1).abs().max().item<double>();
}

class ForgettingAttnCases : public testing::TestWithParam<ForgettingAttnCase> {
 protected:
  void TearDown() override { kernels::force_simd_path(""); }
};

TEST_P(ForgettingAttnCases, Float64EqualsTheReference) {
  const auto x = make_tensors(GetParam(), at::kDouble);
  const auto exact = run_reference(x);
  for (const auto& path : kernels::simd_paths()) {
    SCOPED_TRACE(path);
    kernels::force_simd_path(path);
    expect_as_good(run_op(x), exact, exact, 1e-13, prefix_rounding(x));
  }
}

TEST_P(ForgettingAttnCases, Float32IsAsGoodAsNaive) {
  const auto x = make_tensors(GetParam(), at::kFloat);
  const auto exact = run_reference(make_tensors(GetParam(), at::kDouble));
  const auto naive = run_reference(x);
  for (const auto& path : kernels::simd_paths()) {
    SCOPED_TRACE(path);
    kernels::force_simd_path(path);
    expect_as_good(run_op(x), naive, exact, 1e-6, prefix_rounding(x));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ForgettingAttnCases, testing::ValuesIn(cases::forgetting_attn_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fox
