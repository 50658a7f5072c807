#include "ops/gated_rms_norm.h"

#include <torch/csrc/autograd/custom_function.h>

#include <array>

#include "ops/gated_rms_norm_steps.h"
#include "support/op_check.h"

namespace fox::test {
namespace {

constexpr double kEps = 1e-5;

Op ours(int64_t groups, bool silu) {
  return [=](const Tensors& t) { return ops::gated_rms_norm(t[0], t[1], t[2], kEps, groups, silu); };
}
Op reference(int64_t groups, bool silu) {
  return [=](const Tensors& t) { return ops::gated_rms_norm_reference(t[0], t[1], t[2], kEps, groups, silu); };
}
class StepByStep : public torch::autograd::Function<StepByStep> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& gate,
                            const at::Tensor& weight, int64_t groups, bool silu) {
    ctx->save_for_backward({x, gate, weight});
    ctx->saved_data["groups"] = groups;
    ctx->saved_data["silu"] = silu;
    return ops::gated_rms_norm_steps(x, gate, weight, kEps, groups, silu);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto [dx, dgate, dweight] =
        ops::gated_rms_norm_backward_steps(grads[0], saved[0], saved[1], saved[2], kEps,
                                           ctx->saved_data["groups"].toInt(), ctx->saved_data["silu"].toBool());
    return {dx, dgate, dweight, {}, {}};
  }
};

at::Tensor random(at::IntArrayRef shape) { return at::randn(shape, at::kDouble); }

// As CUDA computes shapes that its kernel does not take, on whatever device.
Op in_steps(int64_t groups, bool silu) {
  return [=](const Tensors& t) {
    return t[0].requires_grad() ? StepByStep::apply(t[0], t[1], t[2], groups, silu)
                                : ops::gated_rms_norm_steps(t[0], t[1], t[2], kEps, groups, silu);
  };
}

TEST(GatedRmsNorm, MatchesReferenceOnEveryPathAndType) {
  at::manual_seed(1);
  on_every_simd_path([](const std::string& path) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const bool silu : {false, true}) {
        for (const auto& [groups, width] : {std::array<int64_t, 2>{1, 96}, {4, 24}, {3, 7}, {2, 64}}) {
          const Tensors inputs{random({3, 5, groups * width}), 3 * random({3, 5, groups * width}),
                               random({groups * width})};
          const Tensors shared{inputs[0], inputs[1], random({width})};
          const auto what = path + (silu ? " silu" : " sigmoid");
          for (const auto& t : {inputs, shared}) {
            expect_as_good_as_reference(ours(groups, silu), reference(groups, silu), t, type, what);
            expect_as_good_as_reference(in_steps(groups, silu), reference(groups, silu), t, type, what + " in steps");
          }
        }
      }
    }
  });
}

TEST(GatedRmsNorm, ReadsAnyStrides) {
  at::manual_seed(2);
  const auto gate = random({2, 5, 72}).narrow(2, 24, 24);
  expect_as_good_as_reference(ours(2, false), reference(2, false),
                              {random({5, 2, 24}).transpose(0, 1), gate, random({24})}, at::kFloat, "packed gate");
}

TEST(GatedRmsNorm, GradientsMatchFiniteDifferences) {
  at::manual_seed(3);
  for (const bool silu : {false, true}) {
    expect_gradients_match_differences(ours(2, silu), {random({3, 6}), random({3, 6}), random({6})}, "grouped");
    expect_gradients_match_differences(ours(2, silu), {random({3, 6}), random({3, 6}), random({3})}, "shared");
  }
}

// A gate that is fully shut or open is finite in either direction.
TEST(GatedRmsNorm, ExtremeGates) {
  const auto x = at::randn({2, 4}).requires_grad_();
  const auto gate = at::tensor({-1e4F, 1e4F, -90.F, 90.F}).expand({2, 4}).clone().requires_grad_();
  for (const bool silu : {false, true}) {
    const auto y = ops::gated_rms_norm(x, gate, at::ones({4}), kEps, 1, silu);
    y.sum().backward();
    for (const auto& t : {y.detach(), x.grad(), gate.grad()}) EXPECT_TRUE(t.isfinite().all().item<bool>());
  }
}

TEST(GatedRmsNorm, MetaErrorsAndSecondDerivative) {
  const Tensors inputs{at::randn({2, 3, 8}), at::randn({2, 3, 8}), at::randn({4})};
  expect_meta_agrees(ours(2, true), inputs);
  expect_double_backward_refused(ours(2, true), inputs);
  expect_error(
      [&] {
        ops::gated_rms_norm(inputs[0], at::randn({2, 8}), inputs[2], kEps, 2, false);
      },
      {"gate", "(2, 8)", "that of x"});
  expect_error([&] { ops::gated_rms_norm(inputs[0], inputs[1].to(at::kHalf), inputs[2], kEps, 2, false); },
               {"gate has dtype Half"});
  expect_error([&] { ops::gated_rms_norm(inputs[0], inputs[1], at::randn({5}), kEps, 2, false); }, {"weight", "(5)"});
}

}  // namespace
}  // namespace fox::test
