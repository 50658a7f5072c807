#include "train/optimizer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"

namespace fox::train {
namespace {

nn::Parameter make_parameter(const std::string& name, std::vector<double> values, bool decay) {
  return {name, at::tensor(values, at::kDouble).requires_grad_(true), decay, true};
}

void set_gradient(const nn::Parameter& parameter, std::vector<double> values) {
  parameter.tensor.mutable_grad() = at::tensor(values, at::kDouble);
}

// One weight by the paper's algorithm 2 (arXiv 1711.05101), with decay scaled by the learning rate.
struct ScalarAdamW {
  double weight, m = 0, v = 0;
  int t = 0;
  void step(double g, double lr, double decay) {
    ++t;
    weight *= 1 - lr * decay;
    m = 0.9 * m + 0.1 * g;
    v = 0.95 * v + 0.05 * g * g;
    const double m_hat = m / (1 - std::pow(0.9, t));
    const double v_hat = v / (1 - std::pow(0.95, t));
    weight -= lr * m_hat / (std::sqrt(v_hat) + 1e-8);
  }
};

TEST(AdamW, FollowsThePaperInBothGroups) {
  const nn::Parameters parameters{make_parameter("w", {0.5}, true), make_parameter("b", {-0.25}, false)};
  AdamW optimizer(parameters, {}, at::kCPU);
  ScalarAdamW w{0.5}, b{-0.25};
  for (int i = 0; i < 20; ++i) {
    const double g = std::sin(i), lr = 1e-2 * (i + 1);
    set_gradient(parameters[0], {g});
    set_gradient(parameters[1], {2 * g});
    optimizer.step(lr);
    w.step(g, lr, 0.1);
    b.step(2 * g, lr, 0);
    ASSERT_NEAR(parameters[0].tensor.item<double>(), w.weight, 1e-12) << "step " << i;
    ASSERT_NEAR(parameters[1].tensor.item<double>(), b.weight, 1e-12) << "step " << i;
  }
}

TEST(AdamW, WithoutAGradientOnlyDecays) {
  const nn::Parameters parameters{make_parameter("w", {2.0}, true)};
  AdamW optimizer(parameters, {}, at::kCPU);
  optimizer.step(0.5);
  EXPECT_DOUBLE_EQ(parameters[0].tensor.item<double>(), 2.0 * (1 - 0.5 * 0.1));
}

TEST(AdamW, LeavesAloneWhatIsNotLearnt) {
  const nn::Parameters parameters{make_parameter("w", {2.0}, true), {"fixed", at::ones({1}, at::kDouble), true, false}};
  AdamW optimizer(parameters, {}, at::kCPU);
  optimizer.step(0.5);
  EXPECT_EQ(parameters[1].tensor.item<double>(), 1.0);
  EXPECT_FALSE(optimizer.state().contains("exp_avg.fixed"));
}

TEST(AdamW, RestoredGoesOnBitForBit) {
  const nn::Parameters one{make_parameter("w", {0.5, 1, -3}, true)};
  AdamW first(one, {}, at::kCPU);
  const auto advance = [](const nn::Parameters& parameters, AdamW& optimizer, int i) {
    set_gradient(parameters[0], {std::sin(i), 0.1 * i, -1});
    optimizer.step(1e-2);
  };
  for (int i = 0; i < 5; ++i) advance(one, first, i);

  const nn::Parameters two{{"w", one[0].tensor.detach().clone().requires_grad_(true), true, true}};
  AdamW second(two, {}, at::kCPU);
  second.restore(first.state(), first.steps(), "state");
  for (int i = 5; i < 10; ++i) {
    advance(one, first, i);
    advance(two, second, i);
  }
  EXPECT_TRUE(at::equal(one[0].tensor, two[0].tensor));
}

TEST(AdamW, RefusesAnotherModelsState) {
  const nn::Parameters one{make_parameter("w", {1}, true)}, two{make_parameter("v", {1}, true)};
  AdamW first(one, {}, at::kCPU), second(two, {}, at::kCPU);
  EXPECT_THROW(second.restore(first.state(), 1, "state"), Error);
}

double global_norm(const nn::Parameters& parameters) { return gradient_norms(parameters).global.item<double>(); }

StepGuard guard(double divisor, bool apply) {
  return {at::full({}, divisor, at::kDouble), at::full({}, apply, at::kBool)};
}

TEST(Clipping, DividesByTheGlobalNorm) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    nn::Parameters parameters{make_parameter("a", {0, 0}, true), make_parameter("b", {0}, false)};
    for (auto& parameter : parameters) parameter.tensor = parameter.tensor.detach().to(type).requires_grad_(true);
    parameters[0].tensor.mutable_grad() = at::tensor({3.0, 0.0}, at::kDouble).to(type);
    parameters[1].tensor.mutable_grad() = at::tensor({4.0}, at::kDouble).to(type);
    const auto norms = gradient_norms(parameters);
    ASSERT_DOUBLE_EQ(norms.global.item<double>(), 5);
    EXPECT_DOUBLE_EQ(norms.each[1].item<double>(), 4);
    const auto divisor = norms.divisor(1);
    EXPECT_DOUBLE_EQ(divisor.item<double>(), 5 + 1e-6);
    AdamW optimizer(parameters, {}, at::kCPU);
    optimizer.step(optimizer.device_lr(0), {divisor, at::ones({}, at::kBool)});
    EXPECT_NEAR(global_norm(parameters), 1, 1e-6);
  }
}

TEST(Clipping, LeavesSmallGradientsAlone) {
  const nn::Parameters parameters{make_parameter("a", {0}, true)};
  set_gradient(parameters[0], {0.5});
  EXPECT_EQ(gradient_norms(parameters).divisor(1).item<double>(), 1);
}

// Squares of float32 gradients overflow above 1.8e19; the norm must not.
TEST(Clipping, NormOfLargeFloat32GradientsIsFinite) {
  const nn::Parameters parameters{{"a", at::zeros({4}, at::kFloat).requires_grad_(true), true, true}};
  parameters[0].tensor.mutable_grad() = at::full({4}, 1e30f);
  EXPECT_NEAR(global_norm(parameters) / 2e30, 1, 1e-6);
}

TEST(Clipping, NormShowsNanAndInfinity) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    const nn::Parameters parameters{make_parameter("a", {0, 0}, true)};
    set_gradient(parameters[0], {1, bad});
    EXPECT_FALSE(std::isfinite(global_norm(parameters)));
  }
}

// What the device decides: neither parameters nor moments nor the count of steps move, in both groups and both dtypes.
TEST(Guard, AStepThatMayNotBeAppliedChangesNothing) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    nn::Parameters parameters{make_parameter("w", {0.5}, true), make_parameter("b", {-0.25}, false)};
    for (auto& parameter : parameters) parameter.tensor = parameter.tensor.detach().to(type).requires_grad_(true);
    const auto give_gradients = [&](double value) {
      for (const auto& parameter : parameters) parameter.tensor.mutable_grad() = at::full({1}, value, type);
    };
    AdamW optimizer(parameters, {}, at::kCPU);
    give_gradients(0.1);
    optimizer.step(optimizer.device_lr(1e-2), guard(2, true));
    std::vector<at::Tensor> before;
    for (const auto& parameter : parameters) before.push_back(parameter.tensor.detach().clone());
    for (const auto& [name, tensor] : optimizer.state()) before.push_back(tensor.clone());
    give_gradients(std::nan(""));
    optimizer.step(optimizer.device_lr(1e-2), guard(std::nan(""), false));
    std::vector<at::Tensor> after;
    for (const auto& parameter : parameters) after.push_back(parameter.tensor.detach());
    for (const auto& [name, tensor] : optimizer.state()) after.push_back(tensor);
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << i;
    EXPECT_EQ(optimizer.steps(), 1);
  }
}

}  // namespace
}  // namespace fox::train
