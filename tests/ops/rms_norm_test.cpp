#include "ops/rms_norm.h"

#include <array>

#include "support/op_check.h"

namespace fox::test {
namespace {

constexpr double kEps = 1e-5;

Op ours(int64_t groups) {
  return [groups](const Tensors& t) {
    return ops::rms_norm(t[0], t.size() > 1 ? std::optional(t[1]) : std::nullopt, kEps, groups);
  };
}
Op reference(int64_t groups) {
  return [groups](const Tensors& t) {
    return ops::rms_norm_reference(t[0], t.size() > 1 ? std::optional(t[1]) : std::nullopt, kEps, groups);
  };
}
at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

TEST(RmsNorm, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const auto& [groups, width] :
           {std::array<int64_t, 2>{1, 1}, {1, 96}, {4, 24}, {3, 7}, {2, 128}, {1, 1000}}) {
        const auto x = random({3, 5, groups * width});
        expect_as_good_as_reference(ours(groups), reference(groups), {x, random({groups * width})}, type, path);
        expect_as_good_as_reference(ours(groups), reference(groups), {x, random({width})}, type, path + " shared");
        expect_as_good_as_reference(ours(groups), reference(groups), {x}, type, path + " without weight");
      }
    }
  });
}

TEST(RmsNorm, ManyRowsOnTwoThreads) {
  at::manual_seed(2);
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  const Tensors inputs{random({1000, 96}), random({96})};
  expect_as_good_as_reference(ours(4), reference(4), inputs, at::kFloat, "two threads");
  const auto cotangent = at::randn({1000, 96}, at::kDouble);
  const auto first = result_and_gradients(ours(4), inputs, cotangent);
  for (int i = 0; i < 5; ++i) {
    const auto again = result_and_gradients(ours(4), inputs, cotangent);
    for (size_t j = 0; j < first.size(); ++j) EXPECT_TRUE(at::equal(first[j], again[j]));
  }
  at::set_num_threads(threads);
}

TEST(RmsNorm, AgreesWithAtensOwn) {
  at::manual_seed(3);
  const auto x = random({4, 6, 64}), w = random({64});
  EXPECT_LE(max_error(ops::rms_norm(x, w, 1e-6), at::rms_norm(x, {64}, w, 1e-6)), 1e-13);
}

TEST(RmsNorm, ReadsAnyStrides) {
  at::manual_seed(4);
  const auto w = random({24});
  expect_as_good_as_reference(ours(2), reference(2), {random({2, 5, 72}).narrow(2, 24, 24), w}, at::kFloat, "columns");
  expect_as_good_as_reference(ours(2), reference(2), {random({2, 24, 5}).transpose(1, 2), w}, at::kFloat, "D-strided");
  expect_as_good_as_reference(ours(2), reference(2), {random({5, 2, 24}).transpose(0, 1), w}, at::kFloat, "time first");
  expect_as_good_as_reference(ours(2), reference(2), {random({2, 5, 24}), random({48}).slice(0, 0, 48, 2)}, at::kFloat,
                              "strided weight");
}

TEST(RmsNorm, GradientsMatchFiniteDifferences) {
  at::manual_seed(5);
  expect_gradients_match_differences(ours(1), {random({3, 6}), random({6})}, "plain");
  expect_gradients_match_differences(ours(2), {random({3, 6}), random({6})}, "grouped");
  expect_gradients_match_differences(ours(2), {random({3, 6}), random({3})}, "shared");
  expect_gradients_match_differences(ours(2), {random({3, 6})}, "no weight");
}

TEST(RmsNorm, Float32WeightServesBfloat16) {
  at::manual_seed(6);
  const auto x = at::randn({4, 32}, at::kBFloat16).requires_grad_(), w = at::randn({32}).requires_grad_();
  const auto y = ops::rms_norm(x, w, kEps);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  const auto exact = ops::rms_norm_reference(x.detach().to(at::kDouble), w.detach().to(at::kDouble), kEps);
  EXPECT_LE(max_error(y.detach(), exact), 0.004 * exact.abs().max().item<double>());
}

TEST(RmsNorm, ZeroRowIsFinite) {
  const auto x = at::zeros({2, 8}).requires_grad_();
  const auto y = ops::rms_norm(x, at::ones({8}), kEps);
  y.sum().backward();
  EXPECT_TRUE(at::equal(y.detach(), at::zeros({2, 8})));
  EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
}

TEST(RmsNorm, MetaErrorsAndSecondDerivative) {
  expect_meta_agrees(ours(2), {at::randn({2, 3, 8}, at::kHalf), at::randn({4}, at::kHalf)});
  expect_double_backward_refused(ours(2), {at::randn({2, 8}), at::randn({8})});
  expect_error([] { ops::rms_norm(at::randn({2, 8}), at::randn({5}), kEps, 2); }, {"weight", "(5)", "(8,)", "(4,)"});
  expect_error([] { ops::rms_norm(at::randn({2, 8}), {}, kEps, 3); }, {"num_groups is 3", "(2, 8)"});
  expect_error([] { ops::rms_norm(at::ones({2, 8}, at::kInt), {}, kEps); }, {"x has dtype Int"});
}

}  // namespace
}  // namespace fox::test
