#include "ops/add_rms_norm.h"

#include "support/op_check.h"

namespace fox::test {
namespace {

constexpr double kEps = 1e-5;

/// Both results side by side, so that the gradient reaches sum and normed.
at::Tensor together(const ops::AddRmsNormResult& result) {
  return at::cat({result.sum, result.normed.to(result.sum.scalar_type())}, -1);
}
at::Tensor ours(const Tensors& t) { return together(ops::add_rms_norm(t[0], t[1], t[2], kEps)); }
at::Tensor reference(const Tensors& t) { return together(ops::add_rms_norm_reference(t[0], t[1], t[2], kEps)); }
at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

TEST(AddRmsNorm, MatchesReferenceOnEveryType) {
  at::manual_seed(1);
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t width : {1, 7, 96, 1000}) {
      expect_as_good_as_reference(ours, reference, {random({3, 5, width}), random({3, 5, width}), random({width})},
                                  type, std::to_string(width));
    }
  }
}

TEST(AddRmsNorm, AFloatStreamTakesBranchesOfFewerDigits) {
  at::manual_seed(2);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto with_branch_in = [type](const auto& op) {
      return [type, op](const Tensors& t) {
        return op({t[0], t[0].scalar_type() == at::kFloat ? t[1].to(type) : t[1], t[2]});
      };
    };
    // Values that both dtypes hold, so that float64 sees the same branch.
    const auto branch = random({4, 48}).to(type).to(at::kDouble);
    expect_as_good_as_reference(with_branch_in(ours), with_branch_in(reference),
                                {random({4, 48}), branch, random({48})}, at::kFloat, c10::toString(type));
    const auto result = ops::add_rms_norm(at::randn({2, 8}), at::randn({2, 8}).to(type), at::ones({8}), kEps);
    EXPECT_EQ(result.sum.scalar_type(), at::kFloat);
    EXPECT_EQ(result.normed.scalar_type(), type);
  }
}

TEST(AddRmsNorm, EachResultAloneHasGradients) {
  at::manual_seed(3);
  const Tensors inputs{random({2, 6}), random({2, 6}), random({6})};
  const auto sum_alone = [](const Tensors& t) { return ops::add_rms_norm(t[0], t[1], t[2], kEps).sum; };
  const auto normed_alone = [](const Tensors& t) { return ops::add_rms_norm(t[0], t[1], t[2], kEps).normed; };
  expect_gradients_match_differences(sum_alone, inputs, "sum");
  expect_gradients_match_differences(normed_alone, inputs, "normed");
  expect_gradients_match_differences(ours, inputs, "both");
}

TEST(AddRmsNorm, ReadsAnyStrides) {
  at::manual_seed(4);
  expect_as_good_as_reference(ours, reference,
                              {random({2, 5, 24}).transpose(0, 1), random({5, 2, 72}).narrow(2, 24, 24), random({24})},
                              at::kFloat, "time first and columns");
}

TEST(AddRmsNorm, MetaErrorsAndSecondDerivative) {
  const Tensors inputs{at::randn({2, 3, 8}), at::randn({2, 3, 8}), at::randn({8})};
  expect_meta_agrees(ours, inputs);
  expect_double_backward_refused(ours, inputs);
  expect_error([&] { ops::add_rms_norm(inputs[0], at::randn({2, 8}), inputs[2], kEps); }, {"branch", "(2, 8)"});
  expect_error([&] { ops::add_rms_norm(inputs[0], inputs[1], at::randn({4}), kEps); }, {"weight", "(4)", "(C,)"});
}

}  // namespace
}  // namespace fox::test
