#include "ops/linear_cross_entropy.h"

#include <array>
#include <cmath>
#include <limits>

#include "support/op_check.h"

namespace fox::test {
namespace {

/// Inputs: x, w, labels, then token weights if any.
Op total(bool reference) {
  return [reference](const Tensors& t) {
    const auto weight = t.size() > 3 ? std::optional(t[3].detach()) : std::nullopt;
    return reference ? ops::linear_cross_entropy_reference(t[0], t[1], t[2], weight).total
                     : ops::linear_cross_entropy(t[0], t[1], t[2], weight).total;
  };
}
at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }
at::Tensor random_labels(int64_t rows, int64_t vocab) {
  auto labels = at::randint(vocab, {rows}, at::kLong);
  if (rows > 2) labels[1].fill_(-100);
  return labels;
}

TEST(LinearCrossEntropy, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble}) {
      for (const auto& [rows, width, vocab] :
           {std::array<int64_t, 3>{1, 1, 2}, {5, 8, 3}, {37, 16, 1025}, {9, 4, 17}}) {
        const Tensors inputs{random({rows, width}), random({vocab, width}), random_labels(rows, vocab)};
        expect_as_good_as_reference(total(false), total(true), inputs, type, path);
        auto weighted = inputs;
        weighted.push_back(at::rand({rows}, at::kDouble));
        expect_as_good_as_reference(total(false), total(true), weighted, type, path + " weighted");
      }
    }
  });
}

TEST(LinearCrossEntropy, SeveralChunksGiveWhatOneGives) {
  at::manual_seed(2);
  // 700 rows of 3000 words are several chunks, the last one short.
  const Tensors inputs{0.3 * random({700, 8}), random({3000, 8}), random_labels(700, 3000)};
  expect_as_good_as_reference(total(false), total(true), inputs, at::kFloat, "chunks");
  const auto ours = ops::linear_cross_entropy(inputs[0], inputs[1], inputs[2]);
  const auto logits = at::mm(inputs[0], inputs[1].t());
  const auto peer = at::cross_entropy_loss(logits, inputs[2], {}, at::Reduction::None, -100);
  EXPECT_LE(max_error(ours.loss_N, peer), 1e-12);
  EXPECT_NEAR(ours.total.item<double>(), at::cross_entropy_loss(logits, inputs[2]).item<double>(), 1e-12);
}

TEST(LinearCrossEntropy, GradientsMatchFiniteDifferences) {
  at::manual_seed(3);
  const Tensors inputs{random({4, 3}), random({5, 3}), random_labels(4, 5)};
  expect_gradients_match_differences(total(false), inputs, "mean");
  const auto weight = at::rand({4}, at::kDouble);
  const Op weighted = [weight](const Tensors& t) {
    return 3 * ops::linear_cross_entropy(t[0], t[1], t[2], weight).total;
  };
  expect_gradients_match_differences(weighted, inputs, "weighted, scaled by what follows");
}

TEST(LinearCrossEntropy, OnlyTheGradientThatIsWanted) {
  at::manual_seed(4);
  const auto x = at::randn({6, 4}), w = at::randn({7, 4}), labels = at::randint(7, {6}, at::kLong);
  const auto x_leaf = x.clone().requires_grad_(), w_leaf = w.clone().requires_grad_();
  ops::linear_cross_entropy(x_leaf, w, labels).total.backward();
  ops::linear_cross_entropy(x, w_leaf, labels).total.backward();
  const auto exact = result_and_gradients(total(true), {x, w, labels}, at::ones({}, at::kDouble));
  EXPECT_LE(max_error(x_leaf.grad(), exact[1]), 1e-6);
  EXPECT_LE(max_error(w_leaf.grad(), exact[2]), 1e-6);
}

TEST(LinearCrossEntropy, LowPrecisionInputsGiveAFloat32Loss) {
  at::manual_seed(5);
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    const auto x = at::randn({20, 16}).to(type), w = at::randn({33, 16}).to(type);
    const auto labels = random_labels(20, 33);
    const auto x_leaf = x.clone().requires_grad_(), w_leaf = w.clone().requires_grad_();
    const auto result = ops::linear_cross_entropy(x_leaf, w_leaf, labels);
    EXPECT_EQ(result.total.scalar_type(), at::kFloat);
    EXPECT_EQ(result.loss_N.scalar_type(), at::kFloat);
    result.total.backward();
    EXPECT_EQ(x_leaf.grad().scalar_type(), type);
    const auto exact =
        result_and_gradients(total(true), {x.to(at::kDouble), w.to(at::kDouble), labels}, at::ones({}, at::kDouble));
    EXPECT_LE(max_error(result.total.detach(), exact[0]), 1e-5);
    EXPECT_LE(max_error(x_leaf.grad(), exact[1]), 0.005 * exact[1].abs().max().item<double>());
    EXPECT_LE(max_error(w_leaf.grad(), exact[2]), 0.005 * exact[2].abs().max().item<double>());
  }
}

TEST(LinearCrossEntropy, LargeLogitsAndNothingToCount) {
  const auto x = at::full({2, 1}, 1e4F).requires_grad_();
  const auto w = at::tensor({1.0F, -1.0F, 0.5F}).view({3, 1});
  const auto sure = ops::linear_cross_entropy(x, w, at::tensor({0, 1}, at::kLong));
  EXPECT_EQ(sure.loss_N[0].item<float>(), 0);
  EXPECT_EQ(sure.loss_N[1].item<float>(), 2e4F);
  const auto nothing = ops::linear_cross_entropy(x, w, at::full({2}, -100, at::kLong));
  nothing.total.backward();
  EXPECT_EQ(nothing.total.item<float>(), 0);
  EXPECT_TRUE(at::equal(x.grad(), at::zeros({2, 1})));
}

// A diverged model must be seen: NaN or infinite logits never come out as a finite loss.
TEST(LinearCrossEntropy, NonFiniteLogitsShow) {
  on_every_simd_path([](const std::string& path) {
    for (const int64_t bad : {0, 20, 32}) {
      auto w = at::randn({33, 2});
      w[bad][0].fill_(std::nanf(""));
      const auto loss = ops::linear_cross_entropy(at::ones({1, 2}), w, at::tensor({5}, at::kLong)).total;
      EXPECT_FALSE(std::isfinite(loss.item<float>())) << path << " " << bad;
      w[bad][0].fill_(std::numeric_limits<float>::infinity());
      const auto infinite = ops::linear_cross_entropy(at::ones({1, 2}), w, at::tensor({5}, at::kLong)).total;
      EXPECT_FALSE(std::isfinite(infinite.item<float>())) << path << " " << bad;
    }
  });
}

TEST(LinearCrossEntropy, ReadsViews) {
  at::manual_seed(6);
  const auto labels = random_labels(6, 9);
  expect_as_good_as_reference(total(false), total(true), {random({6, 12}).narrow(1, 4, 5), random({5, 9}).t(), labels},
                              at::kFloat, "views");
}

TEST(LinearCrossEntropy, MetaErrorsAndSecondDerivative) {
  const Tensors inputs{at::randn({3, 4}), at::randn({5, 4}), at::tensor({0, 4, -100}, at::kLong)};
  expect_meta_agrees(total(false), inputs);
  expect_double_backward_refused(total(false), inputs);
  const auto call = [&](const at::Tensor& labels) { ops::linear_cross_entropy(inputs[0], inputs[1], labels); };
  expect_error([&] { call(at::tensor({0, 5, 1}, at::kLong)); }, {"labels[1] is 5", "0 to 4"});
  expect_error([&] { call(at::tensor({0, 1, -1}, at::kLong)); }, {"labels[2] is -1", "-100"});
  expect_error([&] { call(at::tensor({0, 1}, at::kLong)); }, {"labels has shape (2)"});
  expect_error([&] { call(at::tensor({0, 1, 2}, at::kInt)); }, {"labels has dtype Int"});
  expect_error([&] { ops::linear_cross_entropy(inputs[0], at::randn({5, 3}), inputs[2]); }, {"w has shape (5, 3)"});
  const auto loss = ops::linear_cross_entropy(inputs[0].clone().requires_grad_(), inputs[1], inputs[2]).total;
  loss.backward({}, /*retain_graph=*/true);
  expect_error([&] { loss.backward(); }, {"ran twice"});
}

}  // namespace
}  // namespace fox::test
