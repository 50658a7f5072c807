#include "ops/mamba2.h"

#include "ops/recurrence_check.h"

namespace fox::ops {
namespace {

// H heads of P channels, N state channels; time steps softplus(N(mean, 2)), decay rates from 1 to 3.
test::RecurrenceCase mamba2_case(double mean = -2, int64_t H = 3, int64_t P = 4, int64_t N = 5) {
  return {
      [](const test::Tensors& x, const RecurrenceOptions& o) { return mamba2(x[0], x[1], x[4], x[2], x[3], x[5], o); },
      [](const test::Tensors& x, const RecurrenceOptions& o) {
        return mamba2_reference(x[0], x[1], x[4], x[2], x[3], x[5], o);
      },
      [=](int64_t B, int64_t T) -> test::Tensors {
        return {at::randn({B, T, H, P}, at::kDouble), at::softplus(at::randn({B, T, H}, at::kDouble) * 2 + mean),
                at::randn({B, T, N}, at::kDouble),    at::randn({B, T, N}, at::kDouble),
                -at::linspace(1, 3, H, at::kDouble),  at::randn({H}, at::kDouble)};
      },
      4};
}

TEST(Mamba2, ChunksDoNotMatter) { test::expect_chunks_do_not_matter(mamba2_case()); }
TEST(Mamba2, DocumentsStandAlone) { test::expect_documents_stand_alone(mamba2_case()); }
TEST(Mamba2, PaddingLeavesNoTrace) { test::expect_padding_leaves_no_trace(mamba2_case()); }
TEST(Mamba2, PiecesContinue) { test::expect_pieces_continue(mamba2_case()); }
TEST(Mamba2, Precision) { test::expect_precision(mamba2_case(), "mamba2"); }
// Nine heads are two tasks, which share b and c.
TEST(Mamba2, EverySimdPathAgrees) { test::expect_every_simd_path_agrees(mamba2_case(-2, 9, 70, 21)); }
TEST(Mamba2, PiecesAgree) {
  at::manual_seed(13);
  const auto x = mamba2_case().make(2, 75);
  test::expect_pieces_agree(kMamba2Scan, {x[0], x[1], x[1] * x[4], x[2], x[3], x[5]},
                            at::randn({2, 3, 4, 5}, at::kDouble));
}
TEST(Mamba2, RefusesMisuse) { test::expect_recurrence_refuses_misuse(mamba2_case()); }

// A time step of hundreds leaves nothing of the past: exp(-1000) is 0, and its gradient too.
TEST(Mamba2, LongTimeStepsForgetEverything) {
  test::expect_chunks_do_not_matter(mamba2_case(500));
  test::expect_chunks_do_not_matter(mamba2_case(-40));
}

TEST(Mamba2, GradientsMatchFiniteDifferences) {
  at::manual_seed(11);
  const auto op = [](const test::Tensors& x) {
    return mamba2(x[0], x[1], x[4], x[2], x[3], x[5], {.chunk_size = 3}).o;
  };
  test::expect_gradients_match_differences(op, mamba2_case().make(1, 7), "mamba2");
}

TEST(Mamba2, NamesTheArgumentThatDoesNotFit) {
  const auto x = mamba2_case().make(1, 6);
  test::expect_error([&] { mamba2(x[0], x[1], x[4].narrow(0, 0, 2), x[2], x[3], x[5]); }, {"a has shape (2)", "(3)"});
  test::expect_error([&] { mamba2(x[0], x[1], x[4], x[2], x[3].narrow(2, 0, 4), x[5]); },
                     {"c has shape (1, 6, 4)", "(1, 6, 5)"});
}

}  // namespace
}  // namespace fox::ops
