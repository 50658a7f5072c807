#include "nn/recompute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

namespace fox::nn {
namespace {

struct Gradients {
  at::Tensor value, x, y, w;
};

// A function of two inputs and a parameter with two outputs, of which the loss uses one twice.
Gradients gradients(bool recompute, int* calls) {
  at::manual_seed(1);
  const auto x = at::randn({4, 3}, at::kDouble).requires_grad_(), y = at::randn({4, 3}, at::kDouble).requires_grad_();
  const auto w = at::randn({3, 3}, at::kDouble).requires_grad_();
  const TensorFunction f = [&](const std::vector<at::Tensor>& in) {
    ++*calls;
    const auto z = at::tanh(at::mm(in[0], w)) * in[1];
    return std::vector<at::Tensor>{z, z.exp()};
  };
  const auto out = recompute ? recomputed(f, {x, y}) : f({x, y});
  const auto loss = (out[0] * out[0] + out[1]).sum() + (x * x).sum();
  loss.backward();
  return {loss.detach(), x.grad(), y.grad(), w.grad()};
}

TEST(Recomputed, GivesTheSameBits) {
  int plain_calls = 0, calls = 0;
  const auto expected = gradients(false, &plain_calls), got = gradients(true, &calls);
  EXPECT_EQ(plain_calls, 1);
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(at::equal(got.value, expected.value));
  EXPECT_TRUE(at::equal(got.x, expected.x));
  EXPECT_TRUE(at::equal(got.y, expected.y));
  EXPECT_TRUE(at::equal(got.w, expected.w));
}

TEST(Recomputed, KeepsNothingBetweenWhatGoesInAndOut) {
  const auto x = at::ones({2}).requires_grad_();
  at::Tensor inside;
  const auto out = recomputed(
      [&](const std::vector<at::Tensor>& in) {
        const auto middle = in[0] * 2;
        EXPECT_EQ(middle.requires_grad(), at::GradMode::is_enabled());
        inside = middle;
        return std::vector<at::Tensor>{middle * middle};
      },
      {x})[0];
  EXPECT_FALSE(inside.requires_grad());
  EXPECT_EQ(inside.use_count(), 1);
  out.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), at::full({2}, 8.0)));
}

TEST(Recomputed, WithoutGradientsIsAPlainCall) {
  const at::NoGradGuard no_grad;
  const auto out =
      recomputed([](const std::vector<at::Tensor>& in) { return std::vector{in[0] + 1}; }, {at::ones({2})});
  EXPECT_TRUE(at::equal(out[0], at::full({2}, 2.0)));
}

}  // namespace
}  // namespace fox::nn
