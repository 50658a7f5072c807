#include "ops/token_shift.h"

#include <array>
#include <limits>

#include "support/op_check.h"

namespace fox::test {
namespace {

/// Inputs: x, alpha, then prev when `with_prev`; the boundaries come from outside.
Op shift(bool reference, bool with_prev, std::optional<at::Tensor> cu = {}, std::optional<at::Tensor> start = {}) {
  return [=](const Tensors& t) {
    const auto prev = with_prev ? std::optional(t[2]) : std::nullopt;
    return reference ? ops::token_shift_reference(t[0], t[1], prev, cu, start)
                     : ops::token_shift(t[0], t[1], prev, cu, start);
  };
}
at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }
at::Tensor random_alpha(at::IntArrayRef shape) { return at::rand(shape, at::kDouble); }

void expect_matches(const Tensors& inputs, at::ScalarType type, const std::string& what,
                    std::optional<at::Tensor> cu = {}, std::optional<at::Tensor> start = {}) {
  const bool with_prev = inputs.size() > 2;
  expect_as_good_as_reference(shift(false, with_prev, cu, start), shift(true, with_prev, cu, start), inputs, type,
                              what);
}

TEST(TokenShift, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const auto& [time, heads, dim] : {std::array<int64_t, 3>{1, 1, 1}, {1, 4, 24}, {7, 3, 5}, {33, 2, 64}}) {
        const auto x = random({2, time, heads, dim}), alpha = random_alpha({2, time, heads});
        expect_matches({x, alpha}, type, path);
        expect_matches({x, alpha, random({2, heads, dim})}, type, path + " with prev");
      }
    }
  });
}

TEST(TokenShift, StopsAtBoundaries) {
  at::manual_seed(2);
  const auto cu = at::tensor({0, 1, 4, 4, 9}, at::kLong);
  const auto x = random({1, 9, 2, 5}), alpha = random_alpha({1, 9, 2});
  expect_matches({x, alpha}, at::kFloat, "packed documents", cu);
  expect_matches({x, alpha, random({1, 2, 5})}, at::kFloat, "packed documents after prev", cu);
  const auto start = at::tensor({0, 3, 9}, at::kLong);
  expect_matches({random({3, 9, 2, 5}), random_alpha({3, 9, 2})}, at::kFloat, "left padding", {}, start);

  // Each document alone gives what it gives in the pack.
  const auto y = ops::token_shift(x, alpha, {}, cu);
  const auto document = ops::token_shift(x.slice(1, 4, 9), alpha.slice(1, 4, 9));
  EXPECT_TRUE(at::equal(y.slice(1, 4, 9), document));
}

TEST(TokenShift, PaddingNeverLeaks) {
  auto x = at::randn({1, 6, 1, 3});
  x.slice(1, 0, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  x.requires_grad_();
  const auto y = ops::token_shift(x, at::full({1, 6, 1}, 0.5F), {}, {}, at::tensor({2}, at::kLong));
  EXPECT_TRUE(y.slice(1, 2).isfinite().all().item<bool>());
  y.slice(1, 2).sum().backward();
  EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
}

TEST(TokenShift, ChunksWithPrevEqualOnePass) {
  at::manual_seed(3);
  const auto x = at::randn({2, 12, 2, 5}), alpha = at::rand({2, 12, 2});
  const auto whole = ops::token_shift(x, alpha);
  for (const int64_t cut : {1, 7, 11}) {
    const auto head = ops::token_shift(x.slice(1, 0, cut), alpha.slice(1, 0, cut));
    const auto tail = ops::token_shift(x.slice(1, cut), alpha.slice(1, cut), x.select(1, cut - 1));
    EXPECT_TRUE(at::equal(at::cat({head, tail}, 1), whole)) << cut;
  }
}

TEST(TokenShift, ReadsAnyStrides) {
  at::manual_seed(4);
  const auto alpha = random_alpha({2, 6, 3});
  expect_matches({random({2, 6, 3 * 15}).narrow(2, 15, 15).view({2, 6, 3, 5}), alpha}, at::kFloat, "packed projection");
  expect_matches({random({2, 3, 6, 5}).transpose(1, 2), alpha}, at::kFloat, "heads first");
  expect_matches({random({2, 6, 5, 3}).transpose(2, 3), alpha}, at::kFloat, "D-strided");
  expect_matches({random({2, 6, 3, 5}), random_alpha({2, 3, 6}).transpose(1, 2)}, at::kFloat, "strided alpha");
}

TEST(TokenShift, GradientsMatchFiniteDifferences) {
  at::manual_seed(5);
  const auto x = random({1, 5, 2, 3}), alpha = random_alpha({1, 5, 2}), prev = random({1, 2, 3});
  expect_gradients_match_differences(shift(false, true), {x, alpha, prev}, "with prev");
  expect_gradients_match_differences(shift(false, true, at::tensor({0, 2, 5}, at::kLong)), {x, alpha, prev}, "packed");
  expect_gradients_match_differences(shift(false, false, {}, at::tensor({3}, at::kLong)), {x, alpha}, "padded");
}

TEST(TokenShift, MetaErrorsAndSecondDerivative) {
  const Tensors inputs{at::randn({2, 3, 2, 4}), at::rand({2, 3, 2})};
  expect_meta_agrees(shift(false, false), inputs);
  expect_double_backward_refused(shift(false, false), inputs);
  const auto x = inputs[0], alpha = inputs[1];
  expect_error([&] { ops::token_shift(x, at::rand({2, 3, 3})); }, {"alpha", "(2, 3, 3)", "(B, T, H)"});
  expect_error([&] { ops::token_shift(x.flatten(2), alpha); }, {"x has shape (2, 3, 8)", "(B, T, H, D)"});
  expect_error([&] { ops::token_shift(x, alpha, at::randn({2, 4})); }, {"prev", "(2, 4)"});
  expect_error([&] { ops::token_shift(x, alpha, {}, at::tensor({0, 3}, at::kLong)); }, {"cu_seqlens", "batch of 1"});
  expect_error(
      [&] {
        ops::token_shift(x.narrow(0, 0, 1), alpha.narrow(0, 0, 1), {}, at::tensor({0, 2}, at::kLong));
      },
      {"cu_seqlens", "from 0 to 3"});
  expect_error(
      [&] {
        ops::token_shift(x, alpha, {}, {}, at::tensor({0, 4}, at::kLong));
      },
      {"seq_start[1] is 4", "0 to 3"});
  expect_error([&] { ops::token_shift(x, alpha, {}, {}, at::tensor({0, 1}, at::kInt)); }, {"seq_start", "Int"});
}

}  // namespace
}  // namespace fox::test
