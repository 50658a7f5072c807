// Forgetting attention over a split sequence against the operator that sees all of it, value and gradients.
#include "ops/forgetting_attn_split.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>

#include "cases/forgetting_attn_cases.h"
#include "ops/dtypes.h"
#include "ops/previous_tokens.h"
#include "support/errors.h"
#include "support/op_check.h"
#include "support/ranks.h"

namespace fox {
namespace {

using cases::Gates;
using dist::SequenceShard;
using Shard = std::shared_ptr<const SequenceShard>;

constexpr std::chrono::seconds kTimeout{120};  // a busy machine is no fault

/// Runs `body` on `size` ranks, which must all come to its end.
void on_ranks(int size, const std::function<void(const Shard&)>& body) {
  test::expect_all_fine(test::run_ranks(size, [&](const dist::Launch& launch) {
    const auto group = dist::ProcessGroup::join(launch, at::kCPU, kTimeout);
    body(std::make_shared<SequenceShard>(group));
    group.barrier();
    return std::string("done");
  }));
}

struct Case {
  std::string name = {};
  int64_t batch = 1, length = 0, heads = 2, kv_heads = 2, dim = 16;
  Gates gates = Gates::kNormal;
  ops::ForgettingAttnOptions options = {};
};

struct Tensors {
  at::Tensor q, k, v, d_o;
  std::optional<at::Tensor> log_f;
};

/// The same on every rank.
Tensors make(const Case& c, at::ScalarType type) {
  at::manual_seed(static_cast<uint64_t>(c.length));
  const auto draw = [&](int64_t heads) { return at::randn({c.batch, c.length, heads, c.dim}, at::kDouble).to(type); };
  Tensors x{draw(c.heads), draw(c.kv_heads), draw(c.kv_heads), draw(c.heads), std::nullopt};
  if (c.gates != Gates::kNone) {
    x.log_f = cases::make_gates(c.gates, {c.batch, c.length, c.heads}).to(ops::compute_type(type));
  }
  return x;
}

using Results = std::map<std::string, at::Tensor>;

template <class Op>
Results run(const Tensors& x, const Op& op) {
  const auto leaf = [](const at::Tensor& t) { return t.detach().clone().set_requires_grad(true); };
  std::map<std::string, at::Tensor> inputs{{"dq", leaf(x.q)}, {"dk", leaf(x.k)}, {"dv", leaf(x.v)}};
  std::optional<at::Tensor> log_f;
  if (x.log_f) log_f = inputs["dlog_f"] = leaf(*x.log_f);
  const auto o = op(inputs["dq"], inputs["dk"], inputs["dv"], log_f);
  std::vector<at::Tensor> leaves;
  for (const auto& [name, tensor] : inputs) leaves.push_back(tensor);
  const auto grads = torch::autograd::grad({o}, leaves, {x.d_o});
  Results results{{"o", o.detach()}};
  size_t i = 0;
  for (const auto& [name, tensor] : inputs) results[name] = grads[i++];
  return results;
}

Results run_unsplit(const Tensors& x, const ops::ForgettingAttnOptions& options) {
  return run(x, [&](const auto&... in) { return ops::forgetting_attn(in..., options).o_BTHD; });
}

/// This rank's part of everything.
Results run_split(const Tensors& x, const ops::ForgettingAttnOptions& options, const Shard& shard) {
  Tensors part{shard->take(x.q), shard->take(x.k), shard->take(x.v), shard->take(x.d_o), std::nullopt};
  if (x.log_f) part.log_f = shard->take(*x.log_f);
  return run(part, [&](const auto&... in) { return ops::forgetting_attn_split(in..., options, shard); });
}

void expect_equal(const Results& got, const Results& whole, const Shard& shard, double relative) {
  for (const auto& [name, want] : whole) {
    const double size = want.abs().max().item<double>();
    const double error = (got.at(name) - shard->take(want)).abs().max().item<double>();
    EXPECT_LE(error, relative * (size + 1e-3)) << name << " of rank " << shard->rank();
  }
}

std::vector<Case> split_cases() {
  return {
      {.name = "normal", .length = 512},
      {.name = "weak", .length = 384, .gates = Gates::kWeak},
      {.name = "no gates", .length = 256, .gates = Gates::kNone},
      {.name = "-inf at some", .length = 256, .gates = Gates::kMinusInf},
      {.name = "-1e4 everywhere", .length = 256, .gates = Gates::kAllResets},
      {.name = "two sequences, grouped queries", .batch = 2, .length = 272, .heads = 6, .kv_heads = 2},
      {.name = "one key head", .length = 256, .heads = 3, .kv_heads = 1},
      {.name = "chunks of one token", .length = 8, .heads = 1, .kv_heads = 1},
      {.name = "chunks that are no whole blocks", .length = 8 * 37, .gates = Gates::kWeak},
      {.name = "window across chunks", .length = 512, .gates = Gates::kWeak, .options = {.window = 150}},
      {.name = "window within a chunk", .length = 512, .gates = Gates::kNone, .options = {.window = 5}},
      {.name = "scale", .length = 256, .options = {.scale = -0.4}},
  };
}

void check_cases(const Shard& shard) {
  for (const auto& c : split_cases()) {
    SCOPED_TRACE(c.name);
    const auto x = make(c, at::kDouble);
    expect_equal(run_split(x, c.options, shard), run_unsplit(x, c.options), shard, 1e-12);
  }
}

TEST(ForgettingAttnSplit, OneRankEqualsTheOperator) {
  check_cases(std::make_shared<SequenceShard>(dist::ProcessGroup()));
}
TEST(ForgettingAttnSplit, TwoRanksEqualTheOperator) { on_ranks(2, check_cases); }
TEST(ForgettingAttnSplit, FourRanksEqualTheOperator) { on_ranks(4, check_cases); }

Tensors in_double(const Tensors& x) {
  const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
  return {wide(x.q), wide(x.k), wide(x.v), wide(x.d_o), x.log_f ? std::optional(wide(*x.log_f)) : std::nullopt};
}

TEST(ForgettingAttnSplit, LowerPrecisionIsAsGoodAsTheOperators) {
  on_ranks(2, [](const Shard& shard) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(c10::toString(type));
      const auto x = make({.length = 512, .gates = Gates::kWeak}, type);
      const auto exact = run_unsplit(in_double(x), {}), unsplit = run_unsplit(x, {}), split = run_split(x, {}, shard);
      for (const auto& [name, want] : exact) {
        test::expect_as_good_as_naive(split.at(name), shard->take(unsplit.at(name)), shard->take(want), name);
      }
    }
  });
}

/// Heads of very different reach: h decays to nothing in some 2^(h + 1) tokens.
Tensors log_spaced(int64_t length, int64_t heads, int64_t kv_heads) {
  auto x = make({.length = length, .heads = heads, .kv_heads = kv_heads}, at::kDouble);
  x.log_f = -(-at::arange(1, heads + 1, at::kDouble)).exp2() * (at::rand({1, length, heads}, at::kDouble) + 0.5);
  return x;
}

// What is not sent and what the operator prunes of the rest are not the very blocks that it prunes of the whole
// sequence, but as little: here e^-28 of a row.
TEST(ForgettingAttnSplit, PrunesAsTheOperatorDoes) {
  on_ranks(4, [](const Shard& shard) {
    for (const int64_t kv_heads : {8, 4}) {
      const auto x = log_spaced(2048, 8, kv_heads);
      ops::ForgettingAttnOptions options{.log_pruning_tolerance = -28};
      // Without a bound it is measured: over all of the sequence, whoever has it.
      if (kv_heads == 4) options.logit_bound = at::full({8}, 8.0);
      shard->traffic().bytes = 0;
      expect_equal(run_split(x, options, shard), run_unsplit(x, options), shard, 1e-12);
      const int64_t pruned = shard->traffic().bytes.exchange(0);
      run_split(x, {}, shard);
      EXPECT_GT(pruned, 0);
      EXPECT_LT(pruned, 0.85 * static_cast<double>(shard->traffic().bytes));
    }
  });
}

// Chunk b's keys go to whoever has a later chunk: to every rank but its owner, from rank r those of chunk r always (all
// others have a later one), those of chunk 2P - 1 - r to the ranks before r. Keys and values, and back their gradients.
TEST(ForgettingAttnSplit, SendsWhatIsNeededAndNothingElse) {
  on_ranks(4, [](const Shard& shard) {
    const Case c{.length = 1024, .gates = Gates::kStrong};
    const auto x = make(c, at::kDouble);
    const int64_t row = 2 * c.kv_heads * c.dim * 8, chunk = c.length / 8 * row, slices = 2;
    const int64_t rank = shard->rank(), others = 3, before = rank;

    run_split(x, {}, shard);
    const int64_t lent = others + before;  // chunks sent in the forward and again in the backward pass
    const int64_t borrowed = 6 - rank;     // all before its late chunk but its early one
    EXPECT_EQ(shard->traffic().bytes, chunk * (2 * lent + borrowed));
    EXPECT_EQ(shard->traffic().messages, slices * (2 * lent + borrowed));

    shard->traffic().bytes = shard->traffic().messages = 0;
    run_split(x, {.log_pruning_tolerance = -10, .logit_bound = at::full({2}, 20.0)}, shard);
    EXPECT_EQ(shard->traffic().bytes, 0) << "e^-100 is nothing";
    EXPECT_EQ(shard->traffic().messages, 0);

    // The last 32 keys of the chunk before each, in whole blocks.
    run_split(x, {.window = 33}, shard);
    const int64_t lends = (rank < 3) + (rank > 0), borrows = (rank > 0) + (rank < 3);
    EXPECT_EQ(shard->traffic().bytes, 64 * row * (2 * lends + borrows));
  });
}

TEST(ForgettingAttnSplit, PrunedKeysStayWithinThePromise) {
  on_ranks(2, [](const Shard& shard) {
    const auto x = log_spaced(1024, 8, 8);
    const auto dense = shard->take(run_unsplit(x, {}).at("o"));
    for (const double tolerance : {-10.0, -3.0, -1.0}) {
      const auto pruned = run_split(x, {.log_pruning_tolerance = tolerance}, shard).at("o");
      const double bound = 2 * std::exp(tolerance) * x.v.abs().max().item<double>();
      EXPECT_LE((pruned - dense).abs().max().item<double>(), bound);
    }
  });
}

TEST(ForgettingAttnSplit, ABadGateIsNanOnEveryRank) {
  for (const double bad : {0.5, std::nan("")}) {
    on_ranks(2, [&](const Shard& shard) {
      auto x = make({.length = 64}, at::kDouble);
      x.log_f->index_put_({at::tensor(0), at::tensor(40), at::tensor(1)}, at::scalar_tensor(bad, at::kDouble));
      const auto results = run_split(x, {}, shard);
      EXPECT_TRUE(results.at("o").isnan().all().item<bool>());
      EXPECT_TRUE(results.at("dq").isnan().any().item<bool>());
    });
  }
}

TEST(ForgettingAttnSplit, RefusesWhatItCannotSplit) {
  const auto shard = std::make_shared<SequenceShard>(dist::ProcessGroup());
  const auto x = make({.length = 32}, at::kDouble);
  const auto split = [&](const ops::ForgettingAttnOptions& options) {
    ops::forgetting_attn_split(shard->take(x.q), shard->take(x.k), shard->take(x.v), std::nullopt, options, shard);
  };
  test::expect_error([&] { split({.seq_start = at::zeros({2}, at::kLong)}); }, {"padding", "whole document"});
  test::expect_error([&] { shard->take(at::zeros({1, 33})); }, {"33 tokens", "multiple of 2"});
}

TEST(PreviousTokens, ComeFromTheChunkBeforeAndTheirGradientsGoBack) {
  for (const int size : {2, 3, 4}) {
    on_ranks(size, [](const Shard& shard) {
      const int64_t chunks = shard->chunks();
      const auto whole = at::randn({3, chunks * 5, 4}, at::make_generator<at::CPUGeneratorImpl>(1), at::kDouble);
      const auto x = shard->take(whole).set_requires_grad(true);
      const auto before = ops::previous_tokens(x.narrow(1, 3, 2), shard);
      const auto shifted = at::cat({at::zeros({3, 2, 4}, at::kDouble), whole.narrow(1, 0, chunks * 5 - 2)}, 1);
      EXPECT_TRUE(at::equal(before, shard->take(shifted).narrow(1, 0, 2)));

      const auto weight = at::randn({3, chunks * 5, 4}, at::make_generator<at::CPUGeneratorImpl>(2), at::kDouble);
      const auto grad = torch::autograd::grad({before}, {x}, {shard->take(weight).narrow(1, 0, 2)})[0];
      // Token t is looked at from t + 2, if that is one of the first two of a chunk.
      auto expected = at::zeros_like(whole).unflatten(1, {chunks, 5});
      expected.narrow(1, 0, chunks - 1)
          .narrow(2, 3, 2)
          .copy_(weight.unflatten(1, {chunks, 5}).narrow(1, 1, chunks - 1).narrow(2, 0, 2));
      EXPECT_TRUE(at::equal(grad, shard->take(expected.flatten(1, 2))));
      EXPECT_TRUE(at::equal(shard->gather(shard->take(whole)), whole));
    });
  }
}

}  // namespace
}  // namespace fox
