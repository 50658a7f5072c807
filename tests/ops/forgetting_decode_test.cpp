// Decoding on the CPU against the quadratic definition, sequence by sequence: lengths that differ, pages in any order,
// gates appended all at once or one by one.
#include "ops/forgetting_decode.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"

namespace fox::ops {
namespace {

struct Problem {
  at::Tensor q, k, v, log_f, length;
  int64_t max_keys = 0;
};

Problem make_problem(const std::vector<int32_t>& lengths, int64_t queries, int64_t heads, int64_t kv_heads) {
  at::manual_seed(3);
  Problem p;
  for (const int32_t n : lengths) p.max_keys = std::max<int64_t>(p.max_keys, n);
  const auto batch = static_cast<int64_t>(lengths.size());
  p.q = at::randn({batch, queries, heads, 16});
  p.k = at::randn({batch, p.max_keys, kv_heads, 16});
  p.v = at::randn({batch, p.max_keys, kv_heads, 16});
  p.log_f = at::log_sigmoid(at::randn({batch, p.max_keys, heads}) * 2 + 1);
  p.length = at::tensor(lengths, at::kInt);
  return p;
}

GatePrefixes prefixes_of(const Problem& p, int64_t one_by_one) {
  const auto prefixes = make_gate_prefixes(p.q.size(0), p.q.size(2), p.max_keys, at::kCPU);
  for (int64_t b = 0; b < p.q.size(0); ++b) {
    const GatePrefixes own{prefixes.r_BHT.narrow(0, b, 1), prefixes.block_BHN2.narrow(0, b, 1)};
    const int64_t keys = p.length[b].item<int32_t>(), at_once = std::max<int64_t>(0, keys - one_by_one);
    const auto append = [&](int64_t from, int64_t to) {
      append_gate_prefixes(own, p.log_f.narrow(0, b, 1).narrow(1, from, to - from),
                           at::full({1}, to, at::TensorOptions(at::kInt)));
    };
    append(0, at_once);
    for (int64_t t = at_once; t < keys; ++t) append(t, t + 1);
  }
  return prefixes;
}

/// Each sequence by the definition.
at::Tensor expected(const Problem& p, bool gated, std::optional<int64_t> window = {}) {
  auto o = at::zeros_like(p.q);
  for (int64_t b = 0; b < p.q.size(0); ++b) {
    const int64_t keys = p.length[b].item<int32_t>(), queries = std::min(keys, p.q.size(1));
    if (keys == 0) continue;
    const auto row = [&](const at::Tensor& x, int64_t from, int64_t count) {
      return x.narrow(0, b, 1).narrow(1, from, count).to(at::kDouble);
    };
    const int64_t first = p.q.size(1) - queries;
    const auto gate = gated ? std::optional(row(p.log_f, 0, keys)) : std::nullopt;
    ForgettingAttnOptions options;
    options.window = window;
    o.narrow(0, b, 1)
        .narrow(1, first, queries)
        .copy_(forgetting_attn_reference(row(p.q, first, queries), row(p.k, 0, keys), row(p.v, 0, keys), gate, options)
                   .o_BTHD);
  }
  return o;
}

double largest(const at::Tensor& x) { return x.abs().max().item<double>(); }

TEST(ForgettingDecode, EqualsTheDefinitionForEveryLength) {
  for (const int64_t queries : {1, 3, 8}) {
    const auto p = make_problem({0, 1, 63, 64, 65, 300}, queries, 4, 2);
    for (const bool gated : {false, true}) {
      const auto gate = gated ? std::optional(prefixes_of(p, 5)) : std::nullopt;
      for (const std::optional<int64_t> window : {std::optional<int64_t>(), std::optional<int64_t>(20)}) {
        const auto o = forgetting_decode(p.q, p.k, p.v, p.length, p.max_keys, gate, {.window = window}).o_BTHD;
        EXPECT_LT(largest(o - expected(p, gated, window)), 2e-5) << queries << gated;
      }
    }
  }
}

TEST(ForgettingDecode, PagesMayLieAnywhere) {
  const auto p = make_problem({130, 300}, 2, 4, 2);
  const int64_t pages = (p.max_keys + 63) / 64, batch = 2, kv_heads = 2;
  const auto place = at::randperm(batch * kv_heads * pages).to(at::kInt).view({batch, kv_heads, pages});
  const auto pool = [&](const at::Tensor& x) {
    auto out = at::full({batch * kv_heads * pages, 64, 16}, NAN);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < kv_heads; ++h)
        for (int64_t t = 0; t < p.length[b].item<int32_t>(); ++t)
          out[place[b][h][t / 64].item<int32_t>()][t % 64].copy_(x[b][t][h]);
    return out;
  };
  const auto gate = prefixes_of(p, 0);
  const auto o =
      forgetting_decode(p.q, pool(p.k), pool(p.v), p.length, p.max_keys, gate, {.block_table = place}).o_BTHD;
  EXPECT_LT(largest(o - expected(p, true)), 2e-5);
}

TEST(ForgettingDecode, PrefixesDoNotDependOnHowTheGatesCame) {
  const auto p = make_problem({300, 65}, 1, 2, 2);
  const auto all = prefixes_of(p, 0), single = prefixes_of(p, 300);
  for (int64_t b = 0; b < 2; ++b) {
    const int64_t keys = p.length[b].item<int32_t>();
    EXPECT_TRUE(at::equal(all.r_BHT[b].narrow(1, 0, keys), single.r_BHT[b].narrow(1, 0, keys)));
    const auto c =
        (all.block_BHN2[b].to(at::kDouble).sum(-1).repeat_interleave(64, 1) + all.r_BHT[b]).narrow(1, 0, keys) /
        std::log2(std::exp(1.0));
    const auto sums = p.log_f[b].narrow(0, 0, keys).to(at::kDouble).cumsum(0).t();
    EXPECT_LT(largest(c - sums), 1e-4);
  }
}

TEST(ForgettingDecode, PruningStaysWithinItsTolerance) {
  auto p = make_problem({1000}, 1, 2, 2);
  p.log_f = at::full_like(p.log_f, -0.2);
  const auto gate = prefixes_of(p, 0);
  ForgettingDecodeOptions options{.log_pruning_tolerance = -8, .logit_bound = at::full({2}, 12.0)};
  const auto pruned = forgetting_decode(p.q, p.k, p.v, p.length, p.max_keys, gate, options).o_BTHD;
  EXPECT_LT(largest(pruned - expected(p, true)), 2 * std::exp(-8.0) * largest(p.v) + 1e-5);
}

TEST(ForgettingDecode, RefusesWhatItCannotDo) {
  const auto p = make_problem({70}, 1, 4, 2);
  const auto gate = prefixes_of(p, 0);
  EXPECT_THROW(forgetting_decode(p.q, p.k, p.v, p.length, 71, gate), Error);                  // more than the cache
  EXPECT_THROW(forgetting_decode(p.q, p.k, p.v, p.length.to(at::kLong), 70, gate), Error);    // dtype
  EXPECT_THROW(forgetting_decode(p.q, p.k.narrow(2, 0, 1), p.v, p.length, 70, gate), Error);  // shapes differ
  EXPECT_THROW(forgetting_decode(p.q, p.k, p.v, p.length, 70, gate, {.log_pruning_tolerance = -8}), Error);  // no bound
  EXPECT_THROW(append_gate_prefixes(gate, p.log_f.to(at::kDouble), p.length), Error);
}

}  // namespace
}  // namespace fox::ops
