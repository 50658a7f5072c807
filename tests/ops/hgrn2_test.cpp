#include "ops/hgrn2.h"

#include "ops/recurrence_check.h"

namespace fox::ops {
namespace {

// Gates N(mean, spread) before the sigmoid; keys 1 - g as in HGRN2.
test::RecurrenceCase hgrn2_case(double mean, double spread = 2, int64_t K = 5, int64_t V = 3) {
  return {[](const test::Tensors& x, const RecurrenceOptions& o) { return hgrn2(x[0], x[1], x[2], x[3], o); },
          [](const test::Tensors& x, const RecurrenceOptions& o) { return hgrn2_reference(x[0], x[1], x[2], x[3], o); },
          [=](int64_t B, int64_t T) -> test::Tensors {
            const auto log_g = at::log_sigmoid(at::randn({B, T, 2, K}, at::kDouble) * spread + mean);
            return {at::randn({B, T, 2, K}, at::kDouble), 1 - log_g.exp(), at::randn({B, T, 2, V}, at::kDouble), log_g};
          },
          4};
}

TEST(Hgrn2, ChunksDoNotMatter) { test::expect_chunks_do_not_matter(hgrn2_case(2)); }
TEST(Hgrn2, DocumentsStandAlone) { test::expect_documents_stand_alone(hgrn2_case(2)); }
TEST(Hgrn2, PaddingLeavesNoTrace) { test::expect_padding_leaves_no_trace(hgrn2_case(2)); }
TEST(Hgrn2, PiecesContinue) { test::expect_pieces_continue(hgrn2_case(2)); }
TEST(Hgrn2, Precision) {
  test::expect_precision(hgrn2_case(2), "gates of training");
  test::expect_precision(hgrn2_case(8), "gates that hardly forget");
}
TEST(Hgrn2, EverySimdPathAgrees) { test::expect_every_simd_path_agrees(hgrn2_case(2, 2, 70, 37)); }
TEST(Hgrn2, PiecesAgree) {
  at::manual_seed(13);
  const auto x = hgrn2_case(2).make(2, 75);
  test::expect_pieces_agree(kHgrn2Scan, {x[0], x[1], x[2], x[3]}, at::randn({2, 2, 5, 3}, at::kDouble));
}
TEST(Hgrn2, RefusesMisuse) { test::expect_recurrence_refuses_misuse(hgrn2_case(2)); }

// The product of a few gates is far below what float64 can hold, beside channels that forget nothing.
TEST(Hgrn2, StrongGatesKeepTheDigitsOfWeakOnes) {
  test::expect_chunks_do_not_matter(hgrn2_case(-500, 5));
  test::expect_chunks_do_not_matter(hgrn2_case(0, 500));
  test::expect_precision(hgrn2_case(0, 30), "gates anywhere between nothing and all");
}

// Only what a chunk's gates say between two tokens counts: a gate of 1e-40 before them changes nothing.
TEST(Hgrn2, AStrongGateDoesNotBlurWhatFollows) {
  at::manual_seed(9);
  auto inputs = hgrn2_case(6).make(1, 64);
  for (auto& x : inputs) x = x.to(at::kFloat);
  inputs[3].narrow(1, 3, 1).fill_(-1e6);
  test::Tensors doubles;
  for (const auto& x : inputs) doubles.push_back(x.to(at::kDouble));
  const auto& [q, k, v, log_g] = std::tie(inputs[0], inputs[1], inputs[2], inputs[3]);
  const auto exact = hgrn2_reference(doubles[0], doubles[1], doubles[2], doubles[3]);
  test::expect_as_good_as_naive(hgrn2(q, k, v, log_g).o, hgrn2_reference(q, k, v, log_g).o, exact.o, "o", 4e-7);
}

// ln 0 is a hard reset: finite values and gradients, those of the limit.
TEST(Hgrn2, AGateOfZeroForgetsEverything) {
  at::manual_seed(10);
  const auto c = hgrn2_case(2);
  auto inputs = c.make(2, 40);
  inputs[3].masked_fill_(at::rand(inputs[3].sizes()) < 0.1, -INFINITY);
  test::expect_same_values(c, inputs, {}, 1e-11, "gates of 0");
  auto limit = inputs;
  limit[3] = inputs[3].clamp_min(-800);  // exp(-800) = 0 in float64
  test::expect_close(c.op(inputs, {}).o, c.op(limit, {}).o, 0, 0, "limit");
}

TEST(Hgrn2, GradientsMatchFiniteDifferences) {
  at::manual_seed(11);
  const auto op = [](const test::Tensors& x) { return hgrn2(x[0], x[1], x[2], x[3], {.chunk_size = 4}).o; };
  test::expect_gradients_match_differences(op, hgrn2_case(1).make(1, 7), "hgrn2");
}

TEST(Hgrn2, NamesTheArgumentThatDoesNotFit) {
  const auto x = hgrn2_case(2).make(1, 6);
  test::expect_error([&] { hgrn2(x[0], x[1].narrow(3, 0, 4), x[2], x[3]); },
                     {"k has shape (1, 6, 2, 4)", "(1, 6, 2, 5)"});
  test::expect_error([&] { hgrn2(x[0], x[1], x[2].narrow(2, 0, 1), x[3]); }, {"v has shape (1, 6, 1, 3)"});
  test::expect_error([&] { hgrn2(x[0].to(at::kLong), x[1], x[2], x[3]); }, {"dtype"});
}

}  // namespace
}  // namespace fox::ops
