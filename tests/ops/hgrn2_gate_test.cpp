#include "ops/hgrn2_gate.h"

#include "ops/hgrn2_gate_schema.h"
#include "support/op_check.h"

namespace fox::test {
namespace {

/// The log gate, or the keys, of logits and, if there are two inputs, a lower bound.
Op gate(bool reference, bool keys) {
  return [=](const Tensors& t) {
    const auto lower = t.size() > 1 ? std::optional(t[1]) : std::nullopt;
    const auto g = reference ? ops::hgrn2_gate_reference(t[0], lower) : ops::hgrn2_gate(t[0], lower);
    return keys ? g.k : g.log_g;
  };
}

TEST(Hgrn2Gate, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const int64_t channels : {1, 9, 70}) {
        const auto logits = (at::randn({2, 150, channels + 11}, at::kDouble) * 3).narrow(-1, 5, channels);
        const auto lower = at::rand({channels}, at::kDouble) * 0.9;
        for (const bool keys : {false, true}) {
          expect_as_good_as_reference(gate(false, keys), gate(true, keys), {logits}, type, path);
          expect_as_good_as_reference(gate(false, keys), gate(true, keys), {logits, lower}, type, path + ", bound");
        }
      }
    }
  });
}

TEST(Hgrn2Gate, LeavesTheSameBitsOnAnyNumberOfThreads) {
  at::manual_seed(3);
  const Tensors inputs{at::randn({3, 200, 200}), at::rand({200})};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = result_and_gradients(gate(false, false), inputs, at::ones({3, 200, 200}));
  at::set_num_threads(3);
  const auto three = result_and_gradients(gate(false, false), inputs, at::ones({3, 200, 200}));
  at::set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << i;
}

TEST(Hgrn2Gate, GradientsMatchDifferences) {
  at::manual_seed(2);
  const auto logits = at::randn({2, 3, 4}, at::kDouble) * 2, lower = at::rand({4}, at::kDouble) * 0.9;
  for (const bool keys : {false, true}) {
    expect_gradients_match_differences(gate(false, keys), {logits}, "no bound");
    expect_gradients_match_differences(gate(false, keys), {logits, lower}, "lower bound");
  }
}

TEST(Hgrn2Gate, ExtremeLogitsKeepTheirDigits) {
  const auto logits = at::tensor({-1e4, -40.0, 40.0, 1e4}, at::kDouble).to(at::kFloat).requires_grad_();
  const auto free = ops::hgrn2_gate(logits);
  EXPECT_TRUE(at::allclose(free.log_g, at::tensor({-1e4, -40.0, -std::exp(-40.0), 0.0}).to(at::kFloat), 1e-6, 0));
  EXPECT_TRUE(at::allclose(free.k, at::tensor({1.0, 1.0, std::exp(-40.0), 0.0}).to(at::kFloat), 1e-6, 0));
  const auto bounded = ops::hgrn2_gate(logits, at::full({4}, 0.25, at::kFloat));
  EXPECT_TRUE(at::allclose(bounded.k, free.k * 0.75, 1e-6, 0));
  (free.log_g + free.k + bounded.log_g + bounded.k).sum().backward();
  EXPECT_TRUE(logits.grad().isfinite().all().item<bool>()) << logits.grad();
}

TEST(Hgrn2Gate, IsAnOperator) {
  const auto logits = at::randn({2, 3, 4}), lower = at::rand({4});
  for (const bool keys : {false, true}) {
    expect_meta_agrees(gate(false, keys), {logits, lower});
    expect_double_backward_refused(gate(false, keys), {logits, lower});
  }
  expect_error([&] { ops::hgrn2_gate(logits, at::rand({3})); }, {"hgrn2_gate", "lower", "(C,)"});
  expect_error([] { ops::hgrn2_gate(at::ones({2, 4}, at::kLong)); }, {"logits", "Long"});
  const auto backward = ops::find_operator<ops::Hgrn2GateBackward>("fox::hgrn2_gate_backward");
  expect_error([&] { backward.call(logits, at::rand({2, 3}), logits, lower); }, {"hgrn2_gate_backward", "dk"});
}

}  // namespace
}  // namespace fox::test
