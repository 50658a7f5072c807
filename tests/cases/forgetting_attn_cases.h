#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "ops/forgetting_attn.h"

// The shapes and gates that every kernel of forgetting attention must get right, on every device: tests of values and
// gradients iterate over this one list.
namespace fox::cases {

enum class Gates {
  kNone,
  kNormal,       ///< logsigmoid(N(0, 1))
  kWeak,         ///< logsigmoid(N(7, 1)): long memory
  kOnes,         ///< log f = 0
  kStrong,       ///< -100 everywhere
  kResets,       ///< normal, -1e4 at some positions
  kAllResets,    ///< -1e4 everywhere
  kMinusInf,     ///< normal, -inf at some positions
  kAllMinusInf,  ///< -inf everywhere
};

struct ForgettingAttnCase {
  std::string name = {};
  int64_t batch = 1, q_len = 0, k_len = 0, heads = 1, kv_heads = 1, head_dim = 16;
  Gates gates = Gates::kNormal;
  std::optional<int64_t> window = {};
  std::optional<double> scale = {};
  std::vector<int64_t> seq_start = {};
  std::vector<int64_t> cu_seqlens = {};
  double q_size = 1;  ///< standard deviation of the queries
};

inline void PrintTo(const ForgettingAttnCase& c, std::ostream* out) { *out << c.name; }

inline std::vector<ForgettingAttnCase> forgetting_attn_cases() {
  using enum Gates;
  std::vector<ForgettingAttnCase> cases;
  for (const int64_t t : {1, 2, 63, 64, 65, 127, 128, 129, 191, 257, 300}) {
    cases.push_back({.name = "t" + std::to_string(t), .q_len = t, .k_len = t, .heads = 2, .head_dim = 32});
  }
  for (const int64_t d : {8, 16, 24, 40, 64, 72, 80, 96, 104, 128, 192, 200, 256}) {
    cases.push_back({.name = "d" + std::to_string(d), .q_len = 97, .k_len = 97, .heads = 2, .head_dim = d});
  }
  for (const auto& [name, gates] : std::vector<std::pair<std::string, Gates>>{{"none", kNone},
                                                                              {"weak", kWeak},
                                                                              {"ones", kOnes},
                                                                              {"strong", kStrong},
                                                                              {"resets", kResets},
                                                                              {"all_resets", kAllResets},
                                                                              {"minus_inf", kMinusInf},
                                                                              {"all_minus_inf", kAllMinusInf}}) {
    cases.push_back({.name = "gates_" + name, .q_len = 201, .k_len = 201, .heads = 2, .gates = gates});
    cases.push_back({.name = "gates_" + name + "_q_short", .q_len = 70, .k_len = 201, .heads = 2, .gates = gates});
  }
  for (const int64_t q : {1, 2, 17, 64, 65, 129}) {
    cases.push_back({.name = "q" + std::to_string(q) + "_of_130", .q_len = q, .k_len = 130, .heads = 2});
  }
  for (const int64_t w : {1, 2, 33, 64, 65, 150, 1000}) {
    cases.push_back({.name = "window" + std::to_string(w), .q_len = 200, .k_len = 200, .window = w});
    cases.push_back({.name = "window" + std::to_string(w) + "_q_short", .q_len = 77, .k_len = 200, .window = w});
  }
  cases.push_back({.name = "window_no_gate", .q_len = 200, .k_len = 200, .gates = kNone, .window = 50});
  cases.push_back({.name = "gqa2", .batch = 2, .q_len = 100, .k_len = 100, .heads = 4, .kv_heads = 2});
  cases.push_back({.name = "gqa4_q_short", .batch = 2, .q_len = 30, .k_len = 100, .heads = 4, .kv_heads = 1});
  cases.push_back({.name = "gqa3_window", .q_len = 150, .k_len = 150, .heads = 6, .kv_heads = 2, .window = 40});
  cases.push_back({.name = "scale_half", .q_len = 90, .k_len = 90, .scale = 0.5});
  cases.push_back({.name = "scale_negative", .q_len = 90, .k_len = 90, .scale = -0.3});
  cases.push_back({.name = "scale_zero", .q_len = 90, .k_len = 90, .scale = 0.0});
  cases.push_back({.name = "big_logits", .q_len = 150, .k_len = 150, .q_size = 100});
  cases.push_back(
      {.name = "left_pad", .batch = 4, .q_len = 140, .k_len = 140, .heads = 2, .seq_start = {0, 5, 64, 139}});
  cases.push_back({.name = "left_pad_all", .batch = 2, .q_len = 70, .k_len = 140, .heads = 2, .seq_start = {140, 100}});
  cases.push_back(
      {.name = "left_pad_window", .batch = 2, .q_len = 140, .k_len = 140, .window = 30, .seq_start = {70, 3}});
  cases.push_back(
      {.name = "left_pad_no_gate", .batch = 2, .q_len = 90, .k_len = 90, .gates = kNone, .seq_start = {70, 3}});
  cases.push_back(
      {.name = "documents", .q_len = 230, .k_len = 230, .heads = 2, .cu_seqlens = {0, 1, 64, 64, 100, 230}});
  cases.push_back({.name = "documents_gqa_window",
                   .q_len = 150,
                   .k_len = 150,
                   .heads = 4,
                   .kv_heads = 2,
                   .window = 20,
                   .cu_seqlens = {0, 70, 150}});
  cases.push_back(
      {.name = "documents_no_gate", .q_len = 150, .k_len = 150, .gates = kNone, .cu_seqlens = {0, 70, 150}});
  cases.push_back(
      {.name = "documents_resets", .q_len = 150, .k_len = 150, .gates = kMinusInf, .cu_seqlens = {0, 70, 150}});
  return cases;
}

struct ForgettingAttnTensors {
  at::Tensor q, k, v, d_o;
  std::optional<at::Tensor> log_f;
  ops::ForgettingAttnOptions options;
};

inline at::Tensor make_gates(Gates gates, at::IntArrayRef shape) {
  const auto normal = at::log_sigmoid(at::randn(shape, at::kDouble));
  const auto some = at::rand(shape, at::kDouble) < 0.04;
  switch (gates) {
    case Gates::kWeak:
      return at::log_sigmoid(at::randn(shape, at::kDouble) + 7);
    case Gates::kOnes:
      return at::zeros(shape, at::kDouble);
    case Gates::kStrong:
      return at::full(shape, -100.0, at::kDouble);
    case Gates::kResets:
      return normal.masked_fill(some, -1e4);
    case Gates::kAllResets:
      return at::full(shape, -1e4, at::kDouble);
    case Gates::kMinusInf:
      return normal.masked_fill(some, -std::numeric_limits<double>::infinity());
    case Gates::kAllMinusInf:
      return at::full(shape, -std::numeric_limits<double>::infinity(), at::kDouble);
    default:
      return normal;
  }
}

/// Inputs of a case, the same in every call and in every dtype: drawn in float64 and rounded to float32 first.
inline ForgettingAttnTensors make_tensors(const ForgettingAttnCase& c, at::ScalarType type) {
  at::manual_seed(static_cast<uint64_t>(c.q_len * 1000 + c.head_dim));
  const auto rounded = [&](const at::Tensor& t) { return t.to(at::kFloat).to(type); };
  ForgettingAttnTensors x;
  x.q = rounded(at::randn({c.batch, c.q_len, c.heads, c.head_dim}, at::kDouble) * c.q_size);
  x.k = rounded(at::randn({c.batch, c.k_len, c.kv_heads, c.head_dim}, at::kDouble));
  x.v = rounded(at::randn({c.batch, c.k_len, c.kv_heads, c.head_dim}, at::kDouble));
  x.d_o = rounded(at::randn({c.batch, c.q_len, c.heads, c.head_dim}, at::kDouble));
  if (c.gates != Gates::kNone) {
    const auto gates = make_gates(c.gates, {c.batch, c.k_len, c.heads}).to(at::kFloat);
    x.log_f = type == at::kDouble ? gates.to(at::kDouble) : gates;
  }
  x.options.window = c.window;
  x.options.scale = c.scale;
  if (!c.seq_start.empty()) x.options.seq_start = at::tensor(c.seq_start, at::kLong);
  if (!c.cu_seqlens.empty()) x.options.cu_seqlens = at::tensor(c.cu_seqlens, at::kLong);
  return x;
}

}  // namespace fox::cases
