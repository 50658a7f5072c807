#include "ops/gate.h"

#include <cmath>
#include <limits>

#include "support/op_check.h"

namespace fox::test {
namespace {

const Op kOurs = [](const Tensors& t) {
  return ops::log_sigmoid_gate(t[0], t.size() > 1 ? std::optional(t[1]) : std::nullopt);
};
const Op kReference = [](const Tensors& t) {
  return ops::log_sigmoid_gate_reference(t[0], t.size() > 1 ? std::optional(t[1]) : std::nullopt);
};
at::Tensor random(at::IntArrayRef shape) { return 3 * at::randn(shape, at::kDouble); }

TEST(Gate, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const int64_t heads : {1, 4, 7, 24, 65}) {
        expect_as_good_as_reference(kOurs, kReference, {random({2, 9, heads}), random({heads})}, type, path);
        expect_as_good_as_reference(kOurs, kReference, {random({2, 9, heads})}, type, path + " without bias");
      }
    }
  });
}

// Where the gate hardly forgets, -log f is about e^-x: its relative error is what a memory of 10⁵ tokens is made of.
TEST(Gate, KeepsItsDigitsAtBothEnds) {
  on_every_simd_path([](const std::string& path) {
    for (const double x : {-80.0, -20.0, -1.0, 0.0, 1.0, 8.0, 12.0, 16.0, 40.0, 80.0}) {
      const double exact = x > 0 ? -std::log1p(std::exp(-x)) : x - std::log1p(std::exp(x));
      const auto leaf = at::full({3}, x, at::kFloat).requires_grad_();
      const auto y = ops::log_sigmoid_gate(leaf, {});
      y.sum().backward();
      EXPECT_NEAR(y[1].item<double>(), exact, 4e-7 * std::abs(exact)) << path << " " << x;
      const double slope = 1 / (1 + std::exp(x));
      EXPECT_NEAR(leaf.grad()[1].item<double>(), slope, 6e-7 * slope) << path << " " << x;
    }
    const float inf = std::numeric_limits<float>::infinity();
    const auto ends = ops::log_sigmoid_gate(at::tensor({inf, -inf, 1e30F, -1e30F, std::nanf("")}), {});
    EXPECT_EQ(ends[0].item<float>(), 0) << path;
    EXPECT_EQ(ends[1].item<float>(), -inf) << path;
    EXPECT_EQ(ends[2].item<float>(), 0) << path;
    EXPECT_EQ(ends[3].item<float>(), -1e30F) << path;
    EXPECT_TRUE(std::isnan(ends[4].item<float>())) << path;
  });
}

TEST(Gate, ResultIsFloat32ForLowPrecisionLogits) {
  const auto logits = at::randn({2, 3, 4}, at::kBFloat16).requires_grad_();
  const auto bias = at::randn({4}).requires_grad_();
  const auto y = ops::log_sigmoid_gate(logits, bias);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  y.sum().backward();
  EXPECT_EQ(logits.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(bias.grad().scalar_type(), at::kFloat);
}

TEST(Gate, ReadsViews) {
  at::manual_seed(2);
  expect_as_good_as_reference(kOurs, kReference, {random({2, 9, 12}).narrow(2, 3, 4), random({4})}, at::kFloat, "view");
  expect_as_good_as_reference(kOurs, kReference, {random({2, 4, 9}).transpose(1, 2), random({4})}, at::kFloat,
                              "heads first");
}

TEST(Gate, GradientsMatchFiniteDifferences) {
  at::manual_seed(3);
  expect_gradients_match_differences(kOurs, {random({2, 3, 4}), random({4})}, "with bias");
  expect_gradients_match_differences(kOurs, {random({5, 3})}, "without bias");
}

TEST(Gate, BiasGradientOfManyRowsIsExact) {
  at::manual_seed(4);
  const auto logits = at::randn({100000, 2});
  const auto bias = at::zeros({2}).requires_grad_();
  ops::log_sigmoid_gate(logits, bias).sum().backward();
  const auto exact = at::sigmoid(-logits.to(at::kDouble)).sum(0);
  EXPECT_LE(max_error(bias.grad(), exact), 1e-6 * exact.max().item<double>());
}

TEST(Gate, MetaErrorsAndSecondDerivative) {
  expect_meta_agrees(kOurs, {at::randn({2, 3, 4}, at::kBFloat16), at::randn({4}, at::kBFloat16)});
  expect_double_backward_refused(kOurs, {at::randn({2, 4}), at::randn({4})});
  expect_error([] { ops::log_sigmoid_gate(at::randn({2, 4}), at::randn({3})); }, {"bias", "(3)", "(4)"});
  expect_error([] { ops::log_sigmoid_gate(at::ones({2, 4}, at::kLong), {}); }, {"logits", "Long", "bfloat16"});
}

}  // namespace
}  // namespace fox::test
