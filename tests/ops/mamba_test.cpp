#include "ops/mamba.h"

#include "ops/recurrence_check.h"

namespace fox::ops {
namespace {

// I channels with 3 states each; time steps softplus(N(mean, 2)), decay rates from 1 to 3.
test::RecurrenceCase mamba_case(double mean = -2, int64_t I = 6) {
  return {
      [](const test::Tensors& x, const RecurrenceOptions& o) { return mamba(x[0], x[1], x[4], x[2], x[3], x[5], o); },
      [](const test::Tensors& x, const RecurrenceOptions& o) {
        return mamba_reference(x[0], x[1], x[4], x[2], x[3], x[5], o);
      },
      [=](int64_t B, int64_t T) -> test::Tensors {
        return {at::randn({B, T, I}, at::kDouble),
                at::softplus(at::randn({B, T, I}, at::kDouble) * 2 + mean),
                at::randn({B, T, 3}, at::kDouble),
                at::randn({B, T, 3}, at::kDouble),
                -at::linspace(1, 3, 3 * I, at::kDouble).view({I, 3}),
                at::randn({I}, at::kDouble)};
      },
      4};
}

TEST(Mamba, ChunksDoNotMatter) { test::expect_chunks_do_not_matter(mamba_case()); }
TEST(Mamba, DocumentsStandAlone) { test::expect_documents_stand_alone(mamba_case()); }
TEST(Mamba, PaddingLeavesNoTrace) { test::expect_padding_leaves_no_trace(mamba_case()); }
TEST(Mamba, PiecesContinue) { test::expect_pieces_continue(mamba_case()); }
TEST(Mamba, Precision) { test::expect_precision(mamba_case(), "mamba"); }
TEST(Mamba, EverySimdPathAgrees) { test::expect_every_simd_path_agrees(mamba_case(-2, 75)); }
TEST(Mamba, PiecesAgree) {
  at::manual_seed(13);
  const auto x = mamba_case().make(2, 75);
  const auto first = at::randn({2, 6, 3}, at::kDouble);
  test::expect_pieces_agree(kMambaScan, {x[0], x[1], x[2], x[3], at::empty({1, 0}, at::kBool), x[4], x[5]}, first);
  const auto starts = (at::arange(75) % 20 == 7).unsqueeze(0);
  test::expect_pieces_agree(kMambaScan, {x[0], x[1], x[2], x[3], starts, x[4], x[5]}, first);
}
TEST(Mamba, RefusesMisuse) { test::expect_recurrence_refuses_misuse(mamba_case()); }

// A time step of hundreds leaves nothing of the past: exp(-1000) is 0, and its gradient too.
TEST(Mamba, LongTimeStepsForgetEverything) {
  test::expect_chunks_do_not_matter(mamba_case(500));
  test::expect_chunks_do_not_matter(mamba_case(-40));
}

TEST(Mamba, GradientsMatchFiniteDifferences) {
  at::manual_seed(11);
  const auto op = [](const test::Tensors& x) { return mamba(x[0], x[1], x[4], x[2], x[3], x[5], {.chunk_size = 3}).o; };
  test::expect_gradients_match_differences(op, mamba_case().make(1, 7), "mamba");
}

TEST(Mamba, SecondDerivativesAreRefused) {
  const auto op = [](const test::Tensors& x) { return mamba(x[0], x[1], x[4], x[2], x[3], x[5]).o; };
  test::expect_double_backward_refused(op, mamba_case().make(1, 5));
}

TEST(Mamba, NamesTheArgumentThatDoesNotFit) {
  const auto x = mamba_case().make(1, 6);
  test::expect_error([&] { mamba(x[0], x[1], x[4].t(), x[2], x[3], x[5]); }, {"a has shape (3, 6)", "(6, 3)"});
  test::expect_error([&] { mamba(x[0], x[1], x[4], x[2], x[3].narrow(2, 0, 2), x[5]); },
                     {"c has shape (1, 6, 2)", "(1, 6, 3)"});
}

}  // namespace
}  // namespace fox::ops
