#include "ops/short_conv.h"

#include <array>

#include "support/op_check.h"

namespace fox::test {
namespace {

/// Inputs: x, weight, then bias and the tokens before when there are such.
Op convolution(bool reference, bool with_bias, bool with_before, std::optional<at::Tensor> cu = {}) {
  return [=](const Tensors& t) {
    const auto bias = with_bias ? std::optional(t[2]) : std::nullopt;
    const auto before = with_before ? std::optional(t[with_bias ? 3 : 2]) : std::nullopt;
    return reference ? ops::short_conv_reference(t[0], t[1], bias, before, cu)
                     : ops::short_conv(t[0], t[1], bias, before, cu);
  };
}
Tensors random_inputs(int64_t batch, int64_t time, int64_t channels, int64_t taps, bool with_bias, bool with_before) {
  Tensors inputs{at::randn({batch, time, channels}, at::kDouble), at::randn({taps, channels}, at::kDouble) / 2};
  if (with_bias) inputs.push_back(at::randn({channels}, at::kDouble));
  if (with_before) inputs.push_back(at::randn({batch, taps - 1, channels}, at::kDouble));
  return inputs;
}

TEST(ShortConv, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const auto& [time, channels, taps] :
           {std::array<int64_t, 3>{1, 1, 1}, {1, 70, 4}, {2, 5, 4}, {7, 3, 2}, {33, 64, 4}, {300, 65, 3}}) {
        for (const bool bias : {false, true}) {
          for (const bool before : {false, true}) {
            expect_as_good_as_reference(convolution(false, bias, before), convolution(true, bias, before),
                                        random_inputs(2, time, channels, taps, bias, before), type, path);
          }
        }
      }
    }
  });
}

TEST(ShortConv, StopsAtDocuments) {
  at::manual_seed(2);
  const auto cu = at::tensor({0, 1, 4, 4, 9}, at::kLong);
  for (const int64_t taps : {1, 2, 4, 7}) {
    const auto inputs = random_inputs(1, 9, 5, taps, true, false);
    expect_as_good_as_reference(convolution(false, true, false, cu), convolution(true, true, false, cu), inputs,
                                at::kFloat, "packed documents");
    const auto whole = ops::short_conv(inputs[0], inputs[1], inputs[2], {}, cu);
    const auto alone = ops::short_conv(inputs[0].slice(1, 4, 9), inputs[1], inputs[2]);
    EXPECT_TRUE(at::equal(whole.slice(1, 4, 9), alone));
  }
}

TEST(ShortConv, ReadsStridesAndLeavesTheSameBitsOnAnyNumberOfThreads) {
  at::manual_seed(3);
  const auto packed = at::randn({3, 200, 100});
  const auto x = packed.narrow(2, 10, 70), w = at::randn({70, 4});
  const Tensors inputs{x, w.t()};
  const auto op = convolution(false, false, false);
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = result_and_gradients(op, inputs, at::ones(x.sizes()));
  at::set_num_threads(3);
  const auto three = result_and_gradients(op, {x.contiguous(), w.t().contiguous()}, at::ones(x.sizes()));
  at::set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << i;
}

TEST(ShortConv, GradientsMatchDifferences) {
  at::manual_seed(4);
  expect_gradients_match_differences(convolution(false, true, true), random_inputs(2, 6, 3, 4, true, true), "all");
}

TEST(ShortConv, RefusesWhatDoesNotFit) {
  const auto x = at::randn({2, 5, 3}), w = at::randn({4, 3});
  expect_error([&] { ops::short_conv(x, at::randn({4, 2})); }, {"short_conv", "weight"});
  expect_error([&] { ops::short_conv(x, at::randn({0, 3})); }, {"no taps", "at least 1"});
  expect_error([&] { ops::short_conv(x, w, at::randn({4})); }, {"bias"});
  expect_error([&] { ops::short_conv(x, w, at::ones({3}, at::kLong)); }, {"bias", "Long"});
  expect_error([&] { ops::short_conv(x, w, {}, at::randn({2, 4, 3})); }, {"before"});
  expect_error(
      [&] {
        ops::short_conv(x[0].unsqueeze(0), w, {}, at::randn({1, 3, 3}), at::tensor({0, 5}, at::kLong));
      },
      {"before and cu_seqlens", "begin with 0"});
}

TEST(ShortConv, IsAnOperator) {
  const auto inputs = random_inputs(2, 6, 3, 4, true, true);
  expect_double_backward_refused(convolution(false, true, true), inputs);
  expect_meta_agrees(convolution(false, true, true), inputs);
}

}  // namespace
}  // namespace fox::test
