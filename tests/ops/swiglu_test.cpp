#include "ops/swiglu.h"

#include "support/op_check.h"

namespace fox::test {
namespace {

const Op kOurs = [](const Tensors& t) { return ops::swiglu(t[0]); };
const Op kReference = [](const Tensors& t) { return ops::swiglu_reference(t[0]); };
const Op kOfTwo = [](const Tensors& t) { return ops::swiglu(t[0], t[1]); };
const Op kReferenceOfTwo = [](const Tensors& t) { return ops::swiglu_reference(t[0], t[1]); };

at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

TEST(Swiglu, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const int64_t width : {1, 3, 8, 17, 256}) {
        expect_as_good_as_reference(kOurs, kReference, {random({3, 7, 2 * width})}, type, path);
        expect_as_good_as_reference(kOfTwo, kReferenceOfTwo, {random({3, 7, width}), random({3, 7, width})}, type,
                                    path);
      }
    }
  });
}

TEST(Swiglu, ReadsViewsOfAPackedProjection) {
  at::manual_seed(2);
  const auto packed = random({2, 5, 40});
  expect_as_good_as_reference(kOurs, kReference, {packed.narrow(2, 6, 20)}, at::kFloat, "columns of a projection");
  expect_as_good_as_reference(kOurs, kReference, {random({5, 2, 20}).transpose(0, 1)}, at::kFloat, "time first");
  expect_as_good_as_reference(kOurs, kReference, {random({2, 5, 40}).slice(2, 0, 40, 2)}, at::kFloat, "every other");
  expect_as_good_as_reference(kOfTwo, kReferenceOfTwo, {packed.narrow(2, 6, 20), random({2, 5, 20})}, at::kFloat,
                              "the gate a part of a projection");
  const auto expanded = at::randn({1, 1, 20}).expand({3, 4, 20});
  EXPECT_TRUE(at::equal(ops::swiglu(expanded), ops::swiglu(expanded.contiguous())));
}

TEST(Swiglu, GradientsMatchFiniteDifferences) {
  at::manual_seed(3);
  expect_gradients_match_differences(kOurs, {random({2, 3, 10})}, "swiglu");
  expect_gradients_match_differences(kOfTwo, {random({2, 3, 5}), random({2, 3, 5})}, "gate and value");
}

TEST(Swiglu, LargeAndNonFiniteValues) {
  const auto x = at::tensor({1e4, -1e4, 200.0, -200.0, 1.0, 1.0, 1.0, 1.0}, at::kFloat);
  const auto y = ops::swiglu(x);
  EXPECT_TRUE(at::equal(y, at::tensor({1e4, 0.0, 200.0, 0.0}, at::kFloat))) << y;
  const auto nan = at::tensor({std::nanf(""), 1.0F}, at::kFloat);
  EXPECT_TRUE(ops::swiglu(nan).isnan().all().item<bool>());
}

TEST(Swiglu, EmptyBatch) { EXPECT_EQ(ops::swiglu(at::empty({0, 8})).sizes(), (std::vector<int64_t>{0, 4})); }

TEST(Swiglu, MetaErrorsAndSecondDerivative) {
  expect_meta_agrees(kOurs, {at::randn({2, 3, 8}, at::kBFloat16)});
  expect_meta_agrees(kOfTwo, {at::randn({2, 3, 4}, at::kBFloat16), at::randn({2, 3, 4}, at::kBFloat16)});
  expect_double_backward_refused(kOurs, {at::randn({2, 8})});
  expect_double_backward_refused(kOfTwo, {at::randn({2, 4}), at::randn({2, 4})});
  expect_error([] { ops::swiglu(at::randn({2, 4}), at::randn({2, 3})); }, {"swiglu", "value", "that of gate"});
  expect_error([] { ops::swiglu(at::randn({2, 7})); }, {"swiglu", "gate_up", "(2, 7)", "even"});
  expect_error([] { ops::swiglu(at::ones({2, 8}, at::kLong)); }, {"gate_up", "Long", "float32"});
}

}  // namespace
}  // namespace fox::test
