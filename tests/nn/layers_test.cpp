#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <functional>

#include "base/error.h"
#include "nn/embedding.h"
#include "nn/linear.h"
#include "nn/linear_together.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "support/op_check.h"

namespace fox::nn {
namespace {

TEST(Linear, IsXTimesWTransposedPlusBias) {
  at::manual_seed(1);
  Linear layer(3, 5, /*with_bias=*/true);
  layer.init(0.5);
  layer.bias.copy_(at::randn({5}));
  const auto x = at::randn({2, 4, 3});
  const auto y = layer.forward(x);
  for (int64_t o = 0; o < 5; ++o) {
    const auto by_hand = (x * layer.weight[o]).sum(-1) + layer.bias[o];
    EXPECT_TRUE(at::allclose(y.select(-1, o), by_hand, 1e-5, 1e-6));
  }
}

TEST(Linear, Float32MastersServeBfloat16) {
  at::manual_seed(2);
  Linear layer(8, 4);
  layer.init(0.1);
  layer.weight.requires_grad_();
  const auto x = at::randn({6, 8}, at::kBFloat16);
  const auto y = layer.forward(x);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  EXPECT_EQ(layer.weight.grad().scalar_type(), at::kFloat);
}

TEST(PackedWeights, FollowEveryChangeAndNothingElse) {
  at::manual_seed(4);
  const auto a = at::randn({3, 4}).requires_grad_(), b = at::randn({2, 4}).requires_grad_();
  const PackedWeights packed;
  const auto expected = [&] { return at::cat({a, b}).to(at::kBFloat16).detach(); };
  const auto first = packed.get({a, b}, at::kBFloat16);
  EXPECT_TRUE(at::equal(first, expected()));
  EXPECT_FALSE(first.requires_grad());
  EXPECT_EQ(packed.get({a, b}, at::kBFloat16).data_ptr(), first.data_ptr());
  for (const auto& change : std::vector<std::function<void()>>{[&] { b.detach().fill_(7); },
                                                               [&] {
                                                                 const at::NoGradGuard no_grad;
                                                                 a.mul_(2);
                                                               },
                                                               [&] {
                                                                 a.set_data(at::randn({3, 4}));
                                                               }}) {
    change();
    EXPECT_TRUE(at::equal(packed.get({a, b}, at::kBFloat16), expected()));
  }
  EXPECT_TRUE(at::equal(packed.get({a, b}, at::kDouble), at::cat({a, b}).to(at::kDouble)));
}

TEST(LinearTogether, EqualsOneProductAWeightForwardAndBackward) {
  at::manual_seed(5);
  for (const auto& [type, tolerance] : {std::pair(at::kDouble, 1e-13), std::pair(at::kFloat, 1e-5)}) {
    const auto leaf = [&](at::IntArrayRef shape) { return at::randn(shape, type).requires_grad_(); };
    const auto x = leaf({2, 5, 8});
    const std::vector<at::Tensor> weights{leaf({6, 8}), leaf({1, 8}), leaf({4, 8})};
    const auto dy = at::randn({2, 5, 11}, type);
    const auto gradients = [&](const at::Tensor& y) {
      y.backward(dy);
      std::vector<at::Tensor> result{x.grad().clone()};
      x.mutable_grad().reset();
      for (const auto& weight : weights) {
        result.push_back(weight.grad().clone());
        weight.mutable_grad().reset();
      }
      return result;
    };
    const auto parts = linear_together(x, weights, {});
    ASSERT_EQ(parts.size(), 3u);
    std::vector<at::Tensor> separate;
    for (const auto& weight : weights) separate.push_back(at::linear(x, weight));
    for (size_t i = 0; i < parts.size(); ++i) EXPECT_TRUE(at::allclose(parts[i], separate[i], tolerance, tolerance));
    const auto got = gradients(at::cat(parts, -1)), expected = gradients(at::cat(separate, -1));
    for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], expected[i], tolerance, tolerance)) << i;
  }
}

// A weight that takes no gradient, an input that takes none, and no gradients at all.
TEST(LinearTogether, ComputesOnlyTheGradientsThatAreWanted) {
  const auto x = at::randn({3, 4}), w = at::randn({2, 4}).requires_grad_(), fixed = at::randn({2, 4});
  const auto parts = linear_together(x, {w, fixed}, {});
  at::cat(parts, -1).sum().backward();
  EXPECT_TRUE(w.grad().defined());
  EXPECT_FALSE(fixed.grad().defined());
  EXPECT_FALSE(linear_together(x, {fixed, fixed}, {})[0].requires_grad());
}

TEST(LinearTogether, RefusesASecondDerivative) {
  const auto x = at::randn({3, 4}).requires_grad_(), w = at::randn({2, 4}).requires_grad_();
  const auto y = linear_together(x, {w, w}, {})[0].square().sum();
  EXPECT_THROW(torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true), Error);
}

TEST(Layers, InitialisationHasTheStatedSpread) {
  at::manual_seed(3);
  Linear linear(200, 300, true);
  linear.init(0.06);
  EXPECT_NEAR(linear.weight.std().item<double>(), 0.06, 0.001);
  EXPECT_NEAR(linear.weight.mean().item<double>(), 0, 0.001);
  EXPECT_EQ(linear.bias.abs().max().item<double>(), 0);
  Embedding embedding(500, 100);
  embedding.init(0.02);
  EXPECT_NEAR(embedding.weight.std().item<double>(), 0.02, 0.0005);
  RmsNorm norm(7, 1e-6);
  norm.weight.fill_(3);
  norm.init();
  EXPECT_TRUE(at::equal(norm.weight, at::ones({7})));
}

TEST(Layers, CollectPublishedNamesAndDecay) {
  SwigluMlp mlp(4, 6);
  Linear gate(4, 2, true);
  RmsNorm norm(8, 1e-6, 2, /*shared=*/true);
  Embedding embedding(10, 4);
  Parameters all;
  embedding.collect("model.embeddings.", all);
  mlp.collect("mlp.", all);
  gate.collect("attn.fgate_proj.", all);
  norm.collect("attn.q_norm.", all);
  const std::vector<std::tuple<std::string, std::vector<int64_t>, bool>> expected = {
      {"model.embeddings.weight", {10, 4}, true}, {"mlp.gate_proj.weight", {12, 4}, true},
      {"mlp.down_proj.weight", {4, 6}, true},     {"attn.fgate_proj.weight", {2, 4}, true},
      {"attn.fgate_proj.bias", {2}, false},       {"attn.q_norm.weight", {4}, false}};
  ASSERT_EQ(all.size(), expected.size());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i].name, std::get<0>(expected[i]));
    EXPECT_EQ(all[i].tensor.sizes().vec(), std::get<1>(expected[i]));
    EXPECT_EQ(all[i].decay, std::get<2>(expected[i]));
  }
}

TEST(SwigluMlp, GradientsMatchFiniteDifferences) {
  at::manual_seed(4);
  const test::Op op = [](const test::Tensors& t) {
    SwigluMlp mlp(3, 4);
    mlp.gate_proj.weight = t[1];
    mlp.down_proj.weight = t[2];
    return mlp.forward(t[0]);
  };
  test::expect_gradients_match_differences(
      op, {at::randn({2, 2, 3}, at::kDouble), at::randn({8, 3}, at::kDouble), at::randn({3, 4}, at::kDouble)}, "mlp");
}

TEST(Embedding, LooksUpRowsAndSumsTheirGradients) {
  at::manual_seed(5);
  Embedding embedding(6, 3);
  embedding.init(1);
  embedding.weight.requires_grad_();
  const auto ids = at::tensor({2, 5, 2, 0}, at::kLong).view({2, 2});
  const auto y = embedding.forward(ids);
  EXPECT_TRUE(at::equal(y[0][1], embedding.weight[5]));
  y.sum().backward();
  EXPECT_TRUE(at::equal(embedding.weight.grad().select(1, 0), at::tensor({1.0F, 0.0F, 2.0F, 0.0F, 0.0F, 1.0F})));
}

TEST(Embedding, IdsOutsideTheVocabularyAreNamed) {
  const Embedding embedding(6, 3);
  test::expect_error([&] { embedding.forward(at::tensor({1, 6}, at::kLong)); }, {"token id 6", "vocabulary of 6"});
  test::expect_error([&] { embedding.forward(at::tensor({1, -2}, at::kLong)); }, {"token id -2"});
  test::expect_error([&] { embedding.forward(at::tensor({70000}, at::kLong)); }, {"token id 70000"});
  test::expect_error([&] { embedding.forward(at::tensor({1}, at::kInt)); }, {"ids", "int64"});
}

}  // namespace
}  // namespace fox::nn
