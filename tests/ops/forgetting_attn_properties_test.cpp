// What forgetting attention promises beyond values on ordinary input: long contexts, layouts, padding, documents,
// pruning, refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "cases/forgetting_attn_cases.h"
#include "kernels/cpu/simd.h"
#include "ops/forgetting_attn.h"
#include "ops/forgetting_attn_run.h"

namespace fox {
namespace {

using cases::ForgettingAttnCase;
using cases::ForgettingAttnTensors;
using cases::Gates;
using cases::make_tensors;
using testing_support::Results;
using testing_support::run_op;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

void expect_same(const Results& a, const Results& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i].second, b[i].second, tolerance, tolerance)) << a[i].first;
  }
}
void expect_same_bits(const Results& a, const Results& b) { expect_same(a, b, 0); }

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return std::string(error.what()) + " | " + error.hint();
  }
  return "";
}

// Case 1: "total minus prefix sum" in float32 fails this by far, and so do column sums alone.
TEST(ForgettingAttnLong, GateGradientsKeepTheirDigitsAt32K) {
  auto x = make_tensors({.q_len = 32768, .k_len = 32768, .head_dim = 8}, at::kDouble);
  x.log_f = at::log_sigmoid(at::randn(x.log_f->sizes(), at::kDouble) * 2 + 1).to(at::kFloat).to(at::kDouble);
  auto narrow = x;
  for (auto* t : {&narrow.q, &narrow.k, &narrow.v, &narrow.d_o, &*narrow.log_f}) *t = t->to(at::kFloat);
  const auto want = run_op(x).back().second, got = run_op(narrow).back().second;
  EXPECT_LE((got - want).norm().item<double>() / want.norm().item<double>(), 1e-4);
  EXPECT_EQ(got[0][0][0].item<double>(), 0);
}

TEST(ForgettingAttnLong, PrefixSumsAreExactAt128K) {
  auto x = make_tensors({.q_len = 131072, .k_len = 131072, .head_dim = 8, .window = 64}, at::kDouble);
  x.log_f = at::log_sigmoid(at::randn(x.log_f->sizes(), at::kDouble) * 2 + 1).to(at::kFloat).to(at::kDouble);
  auto narrow = x;
  for (auto* t : {&narrow.q, &narrow.k, &narrow.v, &narrow.d_o, &*narrow.log_f}) *t = t->to(at::kFloat);
  const auto want = run_op(x), got = run_op(narrow);
  for (size_t i = 0; i < want.size(); ++i) {
    // A sum in float32 would be off by 1e-2 here (its last digit at -1e5).
    EXPECT_LE((got[i].second - want[i].second).abs().max().item<double>(), 3e-5) << want[i].first;
  }
}

TEST(ForgettingAttnLong, MoreThan65535Heads) {
  const auto x = make_tensors({.q_len = 2, .k_len = 2, .heads = 70000, .kv_heads = 70000, .head_dim = 8}, at::kDouble);
  EXPECT_TRUE(at::allclose(ops::forgetting_attn(x.q, x.k, x.v, x.log_f).o_BTHD,
                           ops::forgetting_attn_reference(x.q, x.k, x.v, x.log_f).o_BTHD, 1e-12, 1e-12));
}

// Offsets beyond 2^31 elements: three rows 2^30 elements apart, of which only a few pages ever exist.
TEST(ForgettingAttnLong, OffsetsBeyondTwoToThe31) {
  const auto x = make_tensors({.q_len = 4, .k_len = 4, .head_dim = 8}, at::kFloat);
  auto far = x;
  try {
    for (auto* t : {&far.q, &far.k, &far.v}) {
      const auto wide =
          at::empty({3 * (int64_t{1} << 30) + 8}, at::kFloat).as_strided({1, 4, 1, 8}, {0, int64_t{1} << 30, 8, 1});
      *t = wide.copy_(*t);
    }
  } catch (const c10::Error&) {
    GTEST_SKIP() << "not enough address space";
  }
  const auto out = ops::forgetting_attn(far.q, far.k, far.v, far.log_f);
  EXPECT_TRUE(at::equal(out.o_BTHD, ops::forgetting_attn(x.q, x.k, x.v, x.log_f).o_BTHD));
}

// Case 8, with everything on at once.
TEST(ForgettingAttnGradients, EqualFiniteDifferencesInFloat64) {
  for (const Gates gates : {Gates::kNormal, Gates::kNone}) {
    auto x = make_tensors(
        {.q_len = 7, .k_len = 9, .heads = 4, .kv_heads = 2, .head_dim = 8, .gates = gates, .window = 5}, at::kDouble);
    const auto grads = run_op(x);
    const auto loss = [&] {
      return (ops::forgetting_attn(x.q, x.k, x.v, x.log_f, x.options).o_BTHD * x.d_o).sum().item<double>();
    };
    std::vector<at::Tensor> inputs{x.q, x.k, x.v};
    if (x.log_f) inputs.push_back(*x.log_f);
    for (size_t n = 0; n < inputs.size(); ++n) {
      const auto flat = inputs[n].view(-1), grad = grads[n + 2].second.reshape(-1);
      for (int64_t i = 0; i < flat.numel(); ++i) {
        constexpr double kStep = 1e-6;
        const double value = flat[i].item<double>();
        flat[i].fill_(value + kStep);
        const double above = loss();
        flat[i].fill_(value - kStep);
        const double below = loss();
        flat[i].fill_(value);
        EXPECT_NEAR(grad[i].item<double>(), (above - below) / (2 * kStep), 1e-7) << grads[n + 2].first << " " << i;
      }
    }
  }
}

TEST(ForgettingAttnGradients, DoubleBackwardIsRefused) {
  const auto x = make_tensors({.q_len = 5, .k_len = 5, .head_dim = 8}, at::kDouble);
  const auto q = x.q.clone().set_requires_grad(true);
  const auto o = ops::forgetting_attn(q, x.k, x.v, x.log_f).o_BTHD;
  EXPECT_THROW(torch::autograd::grad({o.square().sum()}, {q}, {}, true, true), Error);
}

TEST(ForgettingAttnGradients, HardResetsPassBackExactlyZero) {
  const auto x = make_tensors({.q_len = 150, .k_len = 150, .heads = 2, .gates = Gates::kMinusInf}, at::kFloat);
  const auto d_log_f = run_op(x).back().second;
  EXPECT_TRUE((d_log_f.masked_select(x.log_f->isinf()) == 0).all().item<bool>());
  EXPECT_TRUE(d_log_f.isfinite().all().item<bool>());
}

// Case 9: the CPU adds up in a fixed order, however many threads there are.
TEST(ForgettingAttnThreads, BitsDoNotDependOnThem) {
  const auto x = make_tensors({.batch = 2, .q_len = 300, .k_len = 300, .heads = 4, .kv_heads = 2}, at::kFloat);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const auto one = run_op(x);
  for (const int threads : {2, 3}) {
    at::set_num_threads(threads);
    expect_same_bits(run_op(x), one);
  }
  at::set_num_threads(before);
}

// Case 7.
TEST(ForgettingAttnLayouts, AnyStridesAreRead) {
  const auto x = make_tensors({.batch = 2, .q_len = 70, .k_len = 70, .heads = 2, .kv_heads = 2}, at::kFloat);
  const auto want = run_op(x);
  const auto expect_view = [&](const std::function<at::Tensor(const at::Tensor&)>& view) {
    const auto q = view(x.q), k = view(x.k), v = view(x.v), log_f = view(x.log_f->unsqueeze(-1)).squeeze(-1);
    ASSERT_TRUE(at::equal(q, x.q));
    EXPECT_TRUE(at::equal(ops::forgetting_attn(q, k, v, log_f).o_BTHD, want[0].second));
  };
  expect_view([](const at::Tensor& t) { return t.transpose(1, 2).contiguous().transpose(1, 2); });  // heads first
  expect_view([](const at::Tensor& t) { return t.transpose(1, 3).contiguous().transpose(1, 3); });  // D strided
  expect_view([](const at::Tensor& t) { return t.transpose(0, 1).contiguous().transpose(0, 1); });  // time first
  const auto packed = at::cat({x.q, x.k, x.v}, 2);                                                  // one projection
  const auto parts = packed.chunk(3, 2);
  EXPECT_TRUE(at::equal(ops::forgetting_attn(parts[0], parts[1], parts[2], x.log_f).o_BTHD, want[0].second));
  auto strided = x;  // and backward
  strided.d_o = x.d_o.transpose(1, 3).contiguous().transpose(1, 3);
  expect_same_bits(run_op(strided), want);
  const auto one = at::ones({1, 1, 1, 1}).expand({2, 70, 2, 16});
  EXPECT_TRUE(at::allclose(ops::forgetting_attn(x.q, x.k, one, x.log_f).o_BTHD, at::ones({2, 70, 2, 16})));
}

// Case 6.
TEST(ForgettingAttnPadding, NaNInPaddingNeverLeaks) {
  for (const auto& path : kernels::simd_paths()) {
    SCOPED_TRACE(path);
    kernels::force_simd_path(path);
    const auto clean =
        make_tensors({.batch = 2, .q_len = 100, .k_len = 140, .heads = 2, .seq_start = {75, 64}}, at::kFloat);
    auto dirty = clean;
    for (auto* t : {&dirty.q, &dirty.k, &dirty.v, &dirty.d_o, &*dirty.log_f}) {
      *t = t->clone();
      const int64_t shift = t->size(1) - 140;
      t->select(0, 0).slice(0, 0, 75 + shift).fill_(kNaN);
      t->select(0, 1).slice(0, 0, 64 + shift).fill_(kNaN);
    }
    expect_same_bits(run_op(dirty), run_op(clean));
  }
  kernels::force_simd_path("");
}

TEST(ForgettingAttnPadding, RowsThatSeeNothingAreZero) {
  const auto x = make_tensors({.q_len = 20, .k_len = 40, .seq_start = {40}}, at::kFloat);
  const auto out = run_op(x);
  for (const auto& [name, value] : out) {
    EXPECT_TRUE(name == "lse" ? (value == -kInf).all().item<bool>() : (value == 0).all().item<bool>()) << name;
  }
}

// A diverged model must stay visible.
TEST(ForgettingAttnPadding, NaNOutsidePaddingIsNotHidden) {
  for (const auto& path : kernels::simd_paths()) {
    kernels::force_simd_path(path);
    auto x = make_tensors({.q_len = 100, .k_len = 100}, at::kFloat);
    x.q[0][90][0][3] = kNaN;
    EXPECT_TRUE(ops::forgetting_attn(x.q, x.k, x.v, x.log_f).o_BTHD[0][90].isnan().all().item<bool>()) << path;
  }
  kernels::force_simd_path("");
}

// Cases 12 and 13.
TEST(ForgettingAttnDocuments, GiveWhatTheyGiveAlone) {
  const std::vector<int64_t> bounds{0, 40, 41, 41, 169, 200};
  const auto x = make_tensors({.q_len = 200, .k_len = 200, .heads = 2, .cu_seqlens = bounds}, at::kFloat);
  const auto packed = run_op(x);
  for (size_t n = 0; n + 1 < bounds.size(); ++n) {
    if (bounds[n] == bounds[n + 1]) continue;
    auto alone = x;
    for (auto* t : {&alone.q, &alone.k, &alone.v, &alone.d_o, &*alone.log_f})
      *t = t->slice(1, bounds[n], bounds[n + 1]);
    alone.options.cu_seqlens.reset();
    for (const auto& [name, want] : run_op(alone)) {
      if (name == "lse") continue;
      const auto got = std::find_if(packed.begin(), packed.end(), [&, &key = name](auto& p) { return p.first == key; });
      EXPECT_TRUE(at::allclose(got->second.slice(1, bounds[n], bounds[n + 1]), want, 1e-5, 2e-6)) << name << " " << n;
    }
  }
}

// Case 15.
ForgettingAttnTensors prunable(double tolerance, int64_t q_len) {
  auto x = make_tensors({.q_len = q_len, .k_len = 900, .heads = 3, .head_dim = 16}, at::kFloat);
  x.log_f = at::log_sigmoid(at::randn(x.log_f->sizes()) + at::tensor({-1.0, 1.0, 6.0}, at::kFloat));
  x.options.log_pruning_tolerance = tolerance;
  return x;
}

TEST(ForgettingAttnPruning, ErrorStaysWithinItsBound) {
  for (const int64_t q_len : {900, 130}) {
    for (const double tolerance : {-1.0, -5.0, -10.0}) {
      auto x = prunable(tolerance, q_len);
      // The measured bound of random logits prunes little; a bound from outside is what QK-norm gives.
      x.options.logit_bound = at::matmul(x.q.transpose(1, 2), x.k.permute({0, 2, 3, 1}).expand({1, 3, 16, 900}))
                                  .abs()
                                  .amax(at::IntArrayRef{0, 2, 3}) /
                              4;
      const auto kept = ops::forgetting_attn_kept_share(x.q, x.k, *x.log_f, x.options);
      EXPECT_LT(kept.min().item<double>(), 0.5);
      const auto pruned = ops::forgetting_attn(x.q, x.k, x.v, x.log_f, x.options).o_BTHD;
      x.options.log_pruning_tolerance.reset();
      const auto dense = ops::forgetting_attn(x.q, x.k, x.v, x.log_f, x.options).o_BTHD;
      EXPECT_LE((pruned - dense).abs().max().item<double>(),
                2 * std::exp(tolerance) * x.v.abs().max().item<double>() + 1e-6);
    }
  }
}

TEST(ForgettingAttnPruning, NothingIsPrunedAtToleranceZero) {
  auto x = prunable(-kInf, 900);
  const auto pruned = run_op(x);
  EXPECT_TRUE((ops::forgetting_attn_kept_share(x.q, x.k, *x.log_f, x.options) == 1).all().item<bool>());
  x.options.log_pruning_tolerance.reset();
  expect_same_bits(pruned, run_op(x));
}

/// Key blocks that rows `first` and behind need: the first whose keys, with all before, may hold more than ε of row
/// `first`, given the share exp(2U) Σ_{j<=e} exp(D) / Σ_{j<=first} exp(D) for each e.
int64_t first_needed(const at::Tensor& c, int64_t first, double log_share) {
  const auto decay = at::exp(c[first] - c.narrow(0, 0, first + 1));
  int64_t block = 0;
  while (64 * (block + 1) <= first / 64 * 64 &&
         std::log((decay.narrow(0, 0, 64 * (block + 1)).sum() / decay.sum()).item<double>()) < log_share) {
    ++block;
  }
  return block;
}

TEST(ForgettingAttnPruning, KeptShareEqualsBruteForce) {
  for (const int64_t q_len : {900, 130, 1}) {
    const auto x = prunable(-10, q_len);
    const auto got = ops::forgetting_attn_kept_share(x.q, x.k, *x.log_f, x.options);
    for (int64_t h = 0; h < 3; ++h) {
      const double bound = x.q.select(2, h).norm(2, -1).max().item<double>() *
                           x.k.select(2, 0).norm(2, -1).max().item<double>() / 4 * (1 + 1e-4);
      const auto c = x.log_f->select(2, h)[0].to(at::kDouble).cumsum(0);
      double kept = 0, causal = 0;
      for (int64_t i = 0; i < 900; i += 64) {
        const int64_t first = std::max<int64_t>(i, 900 - q_len);
        if (first >= std::min<int64_t>(i + 64, 900)) continue;
        kept += static_cast<double>(i / 64 + 1 - first_needed(c, first, -10 - 2 * bound));
        causal += static_cast<double>(i / 64 + 1);
      }
      EXPECT_DOUBLE_EQ(got[0][h].item<double>(), kept / causal) << "head " << h << ", queries " << q_len;
    }
  }
}

at::Tensor result(const testing_support::Results& results, const std::string& name) {
  return std::find_if(results.begin(), results.end(), [&](const auto& r) { return r.first == name; })->second;
}

/// Of each row that begins a block behind the first half of the keys, the weight that pruning leaves out of the
/// forward and of the backward pass; q, k and v as the test below makes them.
std::pair<double, double> largest_loss(cases::ForgettingAttnTensors x, int64_t half) {
  auto dense = x;
  dense.options.log_pruning_tolerance.reset();
  const auto loss = [&](const char* name) { return result(run_op(dense), name) - result(run_op(x), name); };
  // v is 1 for the keys that are left out and else 0, so o falls by their weights.
  const double forward = loss("o").max().item<double>();
  double backward = 0;
  for (int64_t i = half; i < x.q.size(1); i += 64) {  // dv_j = P_ij dO_i, if no other row has a dO
    x.d_o.zero_();
    x.d_o[0][i].fill_(1);
    backward = std::max(backward, loss("dv").select(-1, 0).sum().item<double>());
  }
  return {forward, backward};
}

/// All logits at the bound U = 8, those of the keys before `half` above and the rest below; all gates -0.06.
cases::ForgettingAttnTensors worst_logits(int64_t length, int64_t half, double tolerance) {
  auto x = make_tensors({.q_len = length, .k_len = length, .heads = 1, .kv_heads = 1, .head_dim = 64}, at::kDouble);
  x.q.fill_(1), x.k.fill_(-1), x.v.fill_(0);
  x.k.narrow(1, 0, half).fill_(1), x.v.narrow(1, 0, half).fill_(1);
  x.log_f = at::full_like(*x.log_f, -0.06);
  x.options.log_pruning_tolerance = tolerance;
  x.options.logit_bound = at::full({1}, 8.0);
  return x;
}

// What is left out comes as close to ε as the decay of a block, 3.84, and what is kept beside it allow, and never
// beyond.
TEST(ForgettingAttnPruning, TheBoundIsReachedAndHolds) {
  for (const double tolerance : {-1.0, -4.0}) {
    const auto [forward, backward] = largest_loss(worst_logits(1024, 512, tolerance), 512);
    for (const double lost : {forward, backward}) {
      EXPECT_LT(lost, std::exp(tolerance));
      EXPECT_GT(lost, std::exp(tolerance - 4.84));
    }
  }
}

// Its log-sum-exp says nothing about what other keys weigh, and a diverged model must stay visible.
TEST(ForgettingAttnPruning, ARowOfNaNPrunesNothingBackward) {
  auto x = worst_logits(1024, 512, -10);
  const auto far_keys = [&] { return result(run_op(x), "dk").narrow(1, 0, 512); };
  ASSERT_TRUE(far_keys().isfinite().all().item<bool>());
  x.q[0][1000] = kNaN;
  EXPECT_TRUE(far_keys().isnan().all().item<bool>());
}

TEST(ForgettingAttnPruning, TheBoundHoldsWhereRowsSeeLess) {
  for (const char* what : {"window", "documents", "padding", "reset"}) {
    auto x = worst_logits(1024, 512, -1);
    if (what == std::string("window")) x.options.window = 500;
    if (what == std::string("documents")) x.options.cu_seqlens = at::tensor({0, 200, 500, 1024}, at::kLong);
    if (what == std::string("padding")) x.options.seq_start = at::tensor({400}, at::kLong);
    if (what == std::string("reset")) (*x.log_f)[0][480] = -kInf;
    const auto [forward, backward] = largest_loss(x, 512);
    for (const double lost : {forward, backward}) EXPECT_LT(lost, std::exp(-1)) << what;
    EXPECT_LT(ops::forgetting_attn_kept_share(x.q, x.k, *x.log_f, x.options).item<double>(), 0.7) << what;
  }
}

TEST(ForgettingAttnDtypes, SixteenBitsAreComputedInFloat32) {
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    auto x = make_tensors({.q_len = 130, .k_len = 130, .heads = 2}, at::kFloat);
    for (auto* t : {&x.q, &x.k, &x.v, &x.d_o}) *t = t->to(type);
    auto wide = x;
    for (auto* t : {&wide.q, &wide.k, &wide.v, &wide.d_o}) *t = t->to(at::kFloat);
    auto want = run_op(wide);
    for (auto& [name, value] : want) {
      if (name != "lse" && name != "dlog_f") value = value.to(type);
    }
    expect_same_bits(run_op(x), want);
  }
}

TEST(ForgettingAttnDtypes, MetaTensorsGiveShapes) {
  const auto meta = at::TensorOptions().device(at::kMeta);
  const auto out = ops::forgetting_attn(
      at::empty({2, 5, 4, 16}, meta.dtype(at::kBFloat16)), at::empty({2, 9, 2, 16}, meta.dtype(at::kBFloat16)),
      at::empty({2, 9, 2, 16}, meta.dtype(at::kBFloat16)), at::empty({2, 9, 4}, meta.dtype(at::kFloat)));
  EXPECT_EQ(out.o_BTHD.sizes(), at::IntArrayRef({2, 5, 4, 16}));
  EXPECT_EQ(out.o_BTHD.scalar_type(), at::kBFloat16);
  EXPECT_EQ(out.lse_BHT.sizes(), at::IntArrayRef({2, 4, 5}));
  EXPECT_EQ(out.lse_BHT.scalar_type(), at::kFloat);
}

TEST(ForgettingAttnDtypes, EmptyInputsGiveEmptyOutputs) {
  for (const auto& [batch, q_len, k_len] : {std::tuple{0, 3, 3}, {2, 0, 4}, {2, 0, 0}}) {
    const auto x = make_tensors({.batch = batch, .q_len = q_len, .k_len = k_len, .heads = 2}, at::kFloat);
    const auto out = run_op(x);
    EXPECT_EQ(out[0].second.sizes(), x.q.sizes());
    EXPECT_TRUE((out[3].second == 0).all().item<bool>());
  }
}

// Cases 2 and 10: each message names the argument, each hint what would do.
TEST(ForgettingAttnRefuses, WhatItDoesNotSupport) {
  const auto x = make_tensors({.q_len = 6, .k_len = 6, .heads = 2, .kv_heads = 2}, at::kFloat);
  const auto attempt = [](const ForgettingAttnTensors& t) {
    return error_of([&] { ops::forgetting_attn(t.q, t.k, t.v, t.log_f, t.options); });
  };
  const auto with = [&](const std::function<void(ForgettingAttnTensors&)>& change) {
    auto t = x;
    change(t);
    return attempt(t);
  };
  const auto contains = [](const std::string& text, const char* part) {
    return text.find(part) != std::string::npos ? testing::AssertionSuccess() : testing::AssertionFailure() << text;
  };
  EXPECT_EQ(attempt(x), "");
  for (const auto type : {at::kBFloat16, at::kHalf}) {
    EXPECT_TRUE(contains(with([&](auto& t) { t.log_f = t.log_f->to(type); }), "keep gates in float32"));
  }
  EXPECT_TRUE(contains(with([](auto& t) { t.log_f = t.log_f->to(at::kDouble); }), "log_f is float32"));
  for (const double bad : {1e-6, kInf, kNaN}) {
    const auto message = with([&](auto& t) { (t.log_f = t.log_f->clone())->select(1, 4).select(1, 1).fill_(bad); });
    EXPECT_TRUE(contains(message, "log_f[0, 4, 1]")) << bad;
  }
  for (const int64_t dim : {4, 12, 264}) {
    EXPECT_TRUE(contains(with([&](auto& t) {
                           t.q = t.k = t.v = at::zeros({1, 6, 2, dim});
                         }),
                         "multiples of 8 from 8 to 256"));
  }
  EXPECT_TRUE(contains(with([](auto& t) { t.q = t.q.to(at::kInt); }), "float32, float64, bfloat16, float16"));
  EXPECT_TRUE(contains(with([](auto& t) { t.k = t.k.to(at::kDouble); }), "k has dtype"));
  EXPECT_TRUE(contains(with([](auto& t) {
                         t.q = t.q.slice(1, 0, 3).expand({1, 3, 2, 16}).repeat({1, 3, 1, 1});
                       }),
                       "9 queries but 6 keys"));
  EXPECT_TRUE(contains(with([](auto& t) { t.k = t.v = at::zeros({1, 6, 3, 16}); }), "2 query heads over 3 key heads"));
  EXPECT_TRUE(contains(with([](auto& t) { t.log_f = at::zeros({1, 6, 1}); }), "a gate for each query head"));
  EXPECT_TRUE(contains(with([](auto& t) { t.v = at::zeros({1, 5, 2, 16}); }), "v has shape (1, 5, 2, 16)"));
  EXPECT_TRUE(contains(with([](auto& t) { t.options.window = 0; }), "window is 0"));
  EXPECT_TRUE(contains(with([](auto& t) { t.options.scale = kNaN; }), "scale is nan"));
  EXPECT_TRUE(contains(with([](auto& t) { t.options.log_pruning_tolerance = 1; }), "log_pruning_tolerance is 1"));
  EXPECT_TRUE(contains(with([](auto& t) { t.options.seq_start = at::tensor({7}, at::kLong); }), "seq_start[0] is 7"));
  EXPECT_TRUE(contains(with([](auto& t) { t.options.cu_seqlens = at::tensor({0, 5}, at::kLong); }), "from 0 to 6"));
  EXPECT_TRUE(contains(with([](auto& t) {
                         t.options.cu_seqlens = at::tensor({0, 6}, at::kLong);
                         t.options.seq_start = at::tensor({0}, at::kLong);
                       }),
                       "cu_seqlens together with seq_start"));
}

}  // namespace
}  // namespace fox
