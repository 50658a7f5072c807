#include "ops/time_step.h"

#include "support/op_check.h"

namespace fox::test {
namespace {

const Op kOurs = [](const Tensors& t) { return ops::time_step(t[0], t[1]); };
const Op kReference = [](const Tensors& t) { return ops::time_step_reference(t[0], t[1]); };

TEST(TimeStep, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const int64_t channels : {1, 9, 70}) {
        const auto logits = (at::randn({2, 150, channels + 11}, at::kDouble) * 3).narrow(-1, 5, channels);
        expect_as_good_as_reference(kOurs, kReference, {logits, at::randn({channels}, at::kDouble)}, type, path);
      }
    }
  });
}

TEST(TimeStep, LeavesTheSameBitsOnAnyNumberOfThreads) {
  at::manual_seed(2);
  const Tensors inputs{at::randn({3, 200, 200}), at::randn({200})};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = result_and_gradients(kOurs, inputs, at::ones({3, 200, 200}));
  at::set_num_threads(3);
  const auto three = result_and_gradients(kOurs, inputs, at::ones({3, 200, 200}));
  at::set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], three[i])) << i;
}

TEST(TimeStep, GradientsMatchDifferences) {
  at::manual_seed(3);
  expect_gradients_match_differences(kOurs, {at::randn({2, 3, 5}, at::kDouble) * 2, at::randn({5}, at::kDouble)}, "");
}

TEST(TimeStep, ExtremeLogitsKeepTheirDigits) {
  const auto logits = at::tensor({-1e4, -40.0, 40.0, 1e4}, at::kDouble).to(at::kFloat);
  const auto dt = ops::time_step(logits, at::zeros({4}));
  EXPECT_TRUE(at::allclose(dt, at::tensor({0.0, std::exp(-40.0), 40.0, 1e4}).to(at::kFloat), 1e-6, 0)) << dt;
  EXPECT_TRUE(ops::time_step(at::full({3}, NAN), at::zeros({3})).isnan().all().item<bool>());
}

TEST(TimeStep, IsAnOperator) {
  expect_meta_agrees(kOurs, {at::randn({2, 3, 4}, at::kBFloat16), at::randn({4})});
  expect_double_backward_refused(kOurs, {at::randn({2, 4}), at::randn({4})});
  expect_error([] { ops::time_step(at::randn({2, 4}), at::randn({3})); }, {"time_step", "bias", "(C,)"});
  expect_error([] { ops::time_step(at::ones({2, 4}, at::kLong), at::randn({4})); }, {"logits", "Long"});
}

}  // namespace
}  // namespace fox::test
