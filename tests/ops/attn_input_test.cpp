#include "ops/attn_input.h"

#include <array>
#include <limits>

#include "ops/rms_norm.h"
#include "ops/rotary.h"
#include "ops/token_shift.h"
#include "support/op_check.h"

namespace fox::test {
namespace {

/// Which steps a case takes; its inputs are x, then shift_logits, prev and norm_weight as far as they are there.
struct Steps {
  bool shift = false, prev = false, norm = false, shared_norm = false, rotary = false;
  std::optional<at::Tensor> cu_seqlens = {}, seq_start = {};
  int64_t offset = 0;

  std::string name() const {
    return std::string(shift ? "shift " : "") + (prev ? "prev " : "") + (norm ? "norm " : "") +
           (shared_norm ? "shared norm " : "") + (rotary ? "rotary " : "") + (cu_seqlens ? "packed " : "") +
           (seq_start ? "padded" : "");
  }
  Tensors inputs(int64_t batch, int64_t time, int64_t heads, int64_t dim) const {
    const auto random = [](at::IntArrayRef shape) { return at::randn(shape, at::kDouble); };
    Tensors t{random({batch, time, heads, dim})};
    if (shift) t.push_back(random({batch, time, heads}));
    if (prev) t.push_back(random({batch, heads, dim}));
    if (norm) t.push_back(random({heads * dim}));
    if (shared_norm) t.push_back(random({dim}));
    return t;
  }
  Op op(bool reference) const {
    return [steps = *this, reference](const Tensors& t) {
      size_t next = 1;
      ops::AttnInputOptions options{.cu_seqlens = steps.cu_seqlens, .seq_start = steps.seq_start, .norm_eps = 1e-5};
      if (steps.shift) options.shift_logits_BTH = t[next++];
      if (steps.prev) options.prev_BHD = t[next++];
      if (steps.norm || steps.shared_norm) options.norm_weight = t[next++];
      if (steps.rotary) options.rotary_base = 1e4, options.rotary_offset = steps.offset;
      return reference ? ops::attn_input_reference(t[0], options) : ops::attn_input(t[0], options);
    };
  }
};

std::vector<Steps> all_steps() {
  std::vector<Steps> all;
  for (const bool shift : {false, true}) {
    for (const bool prev : {false, true}) {
      for (const bool norm : {false, true}) {
        for (const bool rotary : {false, true}) {
          if (prev && !shift) continue;
          all.push_back({.shift = shift, .prev = prev, .norm = norm, .rotary = rotary, .offset = 3});
        }
      }
    }
  }
  all.push_back({.shift = true, .shared_norm = true});
  return all;
}

TEST(AttnInput, EveryChoiceOfStepsMatchesTheReference) {
  at::manual_seed(1);
  for (const auto& steps : all_steps()) {
    for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      for (const auto& [time, heads, dim] : {std::array<int64_t, 3>{1, 2, 8}, {9, 3, 6}, {5, 2, 64}}) {
        expect_as_good_as_reference(steps.op(false), steps.op(true), steps.inputs(2, time, heads, dim), type,
                                    steps.name());
      }
    }
  }
}

TEST(AttnInput, StopsAtBoundaries) {
  at::manual_seed(2);
  const Steps packed{.shift = true, .norm = true, .cu_seqlens = at::tensor({0, 1, 4, 4, 9}, at::kLong)};
  expect_as_good_as_reference(packed.op(false), packed.op(true), packed.inputs(1, 9, 2, 6), at::kFloat, packed.name());
  const Steps padded{
      .shift = true, .norm = true, .rotary = true, .seq_start = at::tensor({0, 3, 9}, at::kLong), .offset = 0};
  expect_as_good_as_reference(padded.op(false), padded.op(true), padded.inputs(3, 9, 2, 6), at::kFloat, padded.name());
}

TEST(AttnInput, PaddingNeverLeaks) {
  auto x = at::randn({1, 6, 1, 4});
  x.slice(1, 0, 2).fill_(std::numeric_limits<float>::quiet_NaN());
  x.requires_grad_();
  const auto y = ops::attn_input(x, {.shift_logits_BTH = at::zeros({1, 6, 1}),
                                     .seq_start = at::tensor({2}, at::kLong),
                                     .norm_weight = at::ones({4})});
  EXPECT_TRUE(y.slice(1, 2).isfinite().all().item<bool>());
  y.slice(1, 2).sum().backward();
  EXPECT_TRUE(x.grad().slice(1, 2).isfinite().all().item<bool>());
}

TEST(AttnInput, IsTheStepsOneAfterAnother) {
  at::manual_seed(3);
  const auto x = at::randn({2, 7, 2, 8}), logits = at::randn({2, 7, 2}), weight = at::randn({16});
  const auto shifted = ops::token_shift(x, at::sigmoid(logits));
  const auto normed = ops::rms_norm(shifted.flatten(2), weight, 1e-5, 2).view(x.sizes());
  const auto y = ops::attn_input(
      x, {.shift_logits_BTH = logits, .norm_weight = weight, .norm_eps = 1e-5, .rotary_base = 1e4, .rotary_offset = 5});
  EXPECT_TRUE(at::equal(y, ops::rotary(normed, 1e4, 5)));
  EXPECT_TRUE(ops::attn_input(x, {}).is_same(x));
}

TEST(AttnInput, ReadsAnyStrides) {
  at::manual_seed(4);
  const Steps steps{.shift = true, .norm = true, .rotary = true};
  auto inputs = steps.inputs(2, 6, 3, 8);
  const auto packed = at::randn({2, 6, 3 * 24 + 3}, at::kDouble);
  inputs[0] = packed.narrow(2, 24, 24).view({2, 6, 3, 8});
  inputs[1] = packed.narrow(2, 72, 3);
  expect_as_good_as_reference(steps.op(false), steps.op(true), inputs, at::kFloat, "packed projection");
  inputs[0] = at::randn({2, 6, 8, 3}, at::kDouble).transpose(2, 3);
  inputs[1] = at::randn({2, 3, 6}, at::kDouble).transpose(1, 2);
  expect_as_good_as_reference(steps.op(false), steps.op(true), inputs, at::kFloat, "D-strided");
}

TEST(AttnInput, GradientsMatchFiniteDifferences) {
  at::manual_seed(5);
  const Steps all{.shift = true, .prev = true, .norm = true, .rotary = true};
  expect_gradients_match_differences(all.op(false), all.inputs(1, 5, 2, 4), all.name());
  const Steps packed{.shift = true, .shared_norm = true, .cu_seqlens = at::tensor({0, 2, 5}, at::kLong)};
  expect_gradients_match_differences(packed.op(false), packed.inputs(1, 5, 2, 4), packed.name());
}

TEST(AttnInput, MetaErrorsAndSecondDerivative) {
  const Steps steps{.shift = true, .norm = true, .rotary = true};
  const auto inputs = steps.inputs(2, 3, 2, 4);
  expect_meta_agrees(steps.op(false), inputs);
  expect_double_backward_refused(steps.op(false), inputs);
  const auto x = inputs[0];
  expect_error([&] { ops::attn_input(x, {.shift_logits_BTH = at::randn({2, 3, 3})}); }, {"shift_logits", "(B, T, H)"});
  expect_error([&] { ops::attn_input(x, {.norm_weight = at::randn({5})}); }, {"norm_weight", "(5)", "(8,)", "(4,)"});
  expect_error([&] { ops::attn_input(x.narrow(3, 0, 3), {.rotary_base = 1e4}); }, {"D is even"});
  expect_error(
      [&] {
        ops::attn_input(x, {.shift_logits_BTH = inputs[1], .cu_seqlens = at::tensor({0, 3}, at::kLong)});
      },
      {"cu_seqlens", "batch of 1"});
}

}  // namespace
}  // namespace fox::test
