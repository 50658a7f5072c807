#include "ops/delta_net.h"

#include "ops/recurrence_check.h"

namespace fox::ops {
namespace {

// Keys and queries of length 1, beta = sigmoid(N(mean, 2)).
test::RecurrenceCase delta_net_case(double mean = 0, int64_t K = 5, int64_t V = 3) {
  return {
      [](const test::Tensors& x, const RecurrenceOptions& o) { return delta_net(x[0], x[1], x[2], x[3], o); },
      [](const test::Tensors& x, const RecurrenceOptions& o) { return delta_net_reference(x[0], x[1], x[2], x[3], o); },
      [=](int64_t B, int64_t T) -> test::Tensors {
        const auto unit = [&] {
          const auto x = at::randn({B, T, 2, K}, at::kDouble);
          return x / x.norm(2, -1, true);
        };
        return {unit(), unit(), at::randn({B, T, 2, V}, at::kDouble),
                at::sigmoid(at::randn({B, T, 2}, at::kDouble) * 2 + mean)};
      },
      4};
}

TEST(DeltaNet, ChunksDoNotMatter) { test::expect_chunks_do_not_matter(delta_net_case()); }
TEST(DeltaNet, DocumentsStandAlone) { test::expect_documents_stand_alone(delta_net_case()); }
TEST(DeltaNet, PaddingLeavesNoTrace) { test::expect_padding_leaves_no_trace(delta_net_case()); }
TEST(DeltaNet, PiecesContinue) { test::expect_pieces_continue(delta_net_case()); }
TEST(DeltaNet, Precision) { test::expect_precision(delta_net_case(), "delta_net"); }
TEST(DeltaNet, EverySimdPathAgrees) { test::expect_every_simd_path_agrees(delta_net_case(0, 70, 37)); }
TEST(DeltaNet, PiecesAgree) {
  at::manual_seed(13);
  const auto x = delta_net_case().make(2, 75);
  const auto first = at::randn({2, 2, 5, 3}, at::kDouble);
  test::expect_pieces_agree(kDeltaNetScan, {x[0], x[1], x[2], x[3], at::empty({1, 0}, at::kBool)}, first);
  const auto starts = (at::arange(75) % 20 == 7).unsqueeze(0);
  test::expect_pieces_agree(kDeltaNetScan, {x[0], x[1], x[2], x[3], starts}, first);
}
TEST(DeltaNet, RefusesMisuse) { test::expect_recurrence_refuses_misuse(delta_net_case()); }

// More tokens than channels, all written in full: every token overwrites what others left.
TEST(DeltaNet, FullWritesOverwrite) {
  const auto c = delta_net_case(40);  // beta = 1
  test::expect_chunks_do_not_matter(c, 1e-10);
  at::manual_seed(2);
  const auto x = c.make(1, 50);
  const auto state = delta_net(x[0], x[1], x[2], x[3]).state;
  const auto held = at::matmul(x[1].select(1, 49).unsqueeze(-2), state).squeeze(-2);
  test::expect_close(held, x[2].select(1, 49), 1e-12, 0, "the state holds the last value under the last key");
}

TEST(DeltaNet, GradientsMatchFiniteDifferences) {
  at::manual_seed(11);
  const auto op = [](const test::Tensors& x) { return delta_net(x[0], x[1], x[2], x[3], {.chunk_size = 3}).o; };
  test::expect_gradients_match_differences(op, delta_net_case().make(1, 7), "delta_net");
}

TEST(DeltaNet, NamesTheArgumentThatDoesNotFit) {
  const auto x = delta_net_case().make(1, 6);
  test::expect_error([&] { delta_net(x[0], x[1], x[2], x[3].narrow(2, 0, 1)); },
                     {"beta has shape (1, 6, 1)", "(1, 6, 2)"});
  test::expect_error([&] { delta_net(x[0], x[1].narrow(3, 0, 4), x[2], x[3]); }, {"k has shape (1, 6, 2, 4)"});
}

}  // namespace
}  // namespace fox::ops
