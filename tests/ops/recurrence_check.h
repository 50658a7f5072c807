#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "ops/recurrence.h"
#include "ops/scan_op.h"
#include "support/errors.h"
#include "support/op_check.h"

// What holds for every linear recurrence: its chunked form is its token-by-token form, whatever the chunk, the length,
// the packing and the padding, and a sequence may be cut anywhere.
namespace fox::test {

/// Tensors of a call: those in time, (B, T, ...), first, then `constant` ones that have no time dimension.
using Recurrence = std::function<ops::RecurrenceResult(const Tensors&, const ops::RecurrenceOptions&)>;

struct RecurrenceCase {
  Recurrence op, reference;
  /// Inputs of a batch of B rows of T tokens, float64.
  std::function<Tensors(int64_t B, int64_t T)> make;
  size_t in_time;  ///< how many of the inputs have a time dimension
};

/// Output, final state and the gradients of every input, and of the initial state if there is one, under random
/// cotangents that depend on the shapes alone.
inline Tensors values_and_gradients(const Recurrence& op, const Tensors& inputs, ops::RecurrenceOptions options) {
  Tensors leaves;
  for (const auto& x : inputs) leaves.push_back(x.detach().clone().requires_grad_());
  if (options.initial_state) {
    leaves.push_back(options.initial_state->detach().clone().requires_grad_());
    options.initial_state = leaves.back();
  }
  const auto result = op(leaves, options);
  auto generator = at::detail::createCPUGenerator(7);
  const auto times_random = [&](const at::Tensor& x) {
    return (x * at::randn(x.sizes(), generator, at::kDouble).to(x.scalar_type())).sum();
  };
  const auto of_o = times_random(result.o);
  (of_o + times_random(result.state)).backward();
  Tensors all{result.o.detach(), result.state.detach()};
  for (const auto& leaf : leaves) all.push_back(leaf.grad().defined() ? leaf.grad() : at::zeros_like(leaf));
  return all;
}

inline std::string name_of_value(size_t i) {
  return i == 0 ? "o" : i == 1 ? "state" : fmt::format("gradient of input {}", i - 2);
}

/// All of these of both operators, at `relative` of each other.
inline void expect_same_values(const RecurrenceCase& c, const Tensors& inputs, const ops::RecurrenceOptions& options,
                               double relative, const std::string& what) {
  const auto fast = values_and_gradients(c.op, inputs, options),
             slow = values_and_gradients(c.reference, inputs, options);
  for (size_t i = 0; i < fast.size(); ++i) {
    const std::string name = what + ": " + name_of_value(i);
    expect_close(fast[i], slow[i], relative, 1e-13, name);
    EXPECT_TRUE(fast[i].isfinite().all().item<bool>()) << name;
  }
}

inline at::Tensor random_state(const RecurrenceCase& c, const Tensors& inputs) {
  return at::randn_like(c.reference(inputs, {}).state);
}

inline void expect_chunks_do_not_matter(const RecurrenceCase& c, double relative = 1e-11) {
  at::manual_seed(3);
  const std::vector<std::pair<int64_t, int64_t>> length_and_chunk{{1, 64},  {2, 1},   {3, 64},  {16, 5},
                                                                  {16, 16}, {33, 16}, {75, 64}, {77, 24}};
  for (const auto& [length, chunk] : length_and_chunk) {
    const auto inputs = c.make(2, length);
    ops::RecurrenceOptions options;
    options.chunk_size = chunk;
    if (length % 2 == 1) options.initial_state = random_state(c, inputs);
    expect_same_values(c, inputs, options, relative, fmt::format("T = {}, chunk = {}", length, chunk));
  }
}

inline void expect_documents_stand_alone(const RecurrenceCase& c, double relative = 1e-11) {
  at::manual_seed(4);
  const std::vector<int64_t> bounds{0, 5, 5, 6, 29, 48, 61};
  const auto inputs = c.make(1, bounds.back());
  ops::RecurrenceOptions packed;
  packed.cu_seqlens = at::tensor(bounds, at::kLong);
  for (const int64_t chunk : {4, 16, 64}) {
    packed.chunk_size = chunk;
    expect_same_values(c, inputs, packed, relative, fmt::format("packed, chunk = {}", chunk));
    const auto together = c.op(inputs, packed);
    for (size_t d = 0; d + 1 < bounds.size(); ++d) {
      if (bounds[d] == bounds[d + 1]) continue;
      Tensors document = inputs;
      for (size_t i = 0; i < c.in_time; ++i) document[i] = inputs[i].narrow(1, bounds[d], bounds[d + 1] - bounds[d]);
      const auto alone = c.reference(document, {});
      expect_close(together.o.narrow(1, bounds[d], bounds[d + 1] - bounds[d]), alone.o, relative, 0,
                   fmt::format("document {}, chunk = {}", d, chunk));
      if (d + 2 == bounds.size()) expect_close(together.state, alone.state, relative, 0, "state");
    }
  }
}

/// In float32 as good as token by token in float32, gradients too; bfloat16 inputs keep a float32 state and are as good
/// as that.
inline void expect_precision(const RecurrenceCase& c, const std::string& what) {
  at::manual_seed(8);
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    Tensors rounded, exact;
    for (const auto& x : c.make(2, 130)) {
      rounded.push_back(x.to(type));
      exact.push_back(rounded.back().to(at::kDouble));
    }
    const auto expected = values_and_gradients(c.reference, exact, {});
    const auto ours = values_and_gradients(c.op, rounded, {}), naive = values_and_gradients(c.reference, rounded, {});
    EXPECT_EQ(ours[0].scalar_type(), type);
    EXPECT_EQ(ours[1].scalar_type(), at::kFloat);
    const size_t count = type == at::kFloat ? ours.size() : 2;
    for (size_t i = 0; i < count; ++i) {
      expect_as_good_as_naive(ours[i], naive[i], expected[i], what + ", " + name_of_value(i), 4e-7);
    }
  }
}

/// On every instruction set, over more chunks than a kept state serves and, given such a case, more channels than the
/// register block of a product has: several vectors and a part of one. On several threads too.
inline void expect_every_simd_path_agrees(const RecurrenceCase& c, double relative = 1e-11) {
  const auto expect_long_sequence = [&](const std::string& what) {
    at::manual_seed(12);
    const auto inputs = c.make(1, 270);
    expect_same_values(c, inputs, {.initial_state = random_state(c, inputs)}, relative, what);
  };
  on_every_simd_path([&](const std::string& path) {
    expect_long_sequence(path + ", one sequence");
    expect_same_values(c, c.make(1, 150), {.cu_seqlens = at::tensor({0, 3, 67, 70, 150}, at::kLong)}, relative,
                       path + ", packed");
    expect_precision(c, path);
  });
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  expect_long_sequence("three threads");
  at::set_num_threads(threads);
}

/// What a device without a kernel computes, the operator piece by piece in ATen calls, is what the kernel computes.
/// inputs: of the operator fox::NAME_scan.
inline void expect_pieces_agree(const ops::ScanOp& op, const Tensors& inputs, const at::Tensor& first,
                                double relative = 1e-11) {
  constexpr int64_t kChunkSize = 32;
  Tensors leaves;
  for (const auto& x : inputs) leaves.push_back(x.detach().requires_grad_(x.is_floating_point()));
  const auto first_leaf = first.detach().requires_grad_();
  const auto result = ops::scan(op, leaves, first_leaf, kChunkSize);
  const auto d_o = at::randn_like(result.o.detach()), dlast = at::randn_like(result.state.detach());
  ((result.o * d_o).sum() + (result.state * dlast).sum()).backward();
  const auto [o, last, kept] = ops::scan_in_pieces(op, inputs, first, kChunkSize);
  const auto [gradients, dfirst] = ops::scan_in_pieces_backward(op, d_o, dlast, inputs, first, kept, kChunkSize);
  expect_close(result.o.detach(), o, relative, 1e-13, "o");
  expect_close(result.state.detach(), last, relative, 1e-13, "state");
  expect_close(first_leaf.grad(), dfirst, relative, 1e-13, "gradient of the first state");
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].is_floating_point()) continue;
    expect_close(leaves[i].grad(), gradients[i], relative, 1e-13, fmt::format("gradient of input {}", i));
  }
}

/// Left padding full of NaN: output, state and gradients are those of the tokens behind it.
inline void expect_padding_leaves_no_trace(const RecurrenceCase& c, double relative = 1e-11) {
  at::manual_seed(5);
  const int64_t T = 21;
  const std::vector<int64_t> starts{0, 9, 20, 21};
  const auto clean = c.make(static_cast<int64_t>(starts.size()), T);
  Tensors inputs;
  for (size_t i = 0; i < clean.size(); ++i) {
    auto x = clean[i].clone();
    for (size_t b = 0; i < c.in_time && b < starts.size(); ++b) x[b].narrow(0, 0, starts[b]).fill_(NAN);
    inputs.push_back(x.requires_grad_());
  }
  ops::RecurrenceOptions options;
  options.seq_start = at::tensor(starts, at::kLong);
  options.chunk_size = 8;
  const auto padded = c.op(inputs, options);
  at::Tensor sum = padded.state.sum();
  for (size_t b = 0; b < starts.size(); ++b) {
    if (starts[b] == T) {
      EXPECT_EQ(padded.state[b].count_nonzero().item<int64_t>(), 0);
      continue;
    }
    Tensors row = clean;
    for (size_t i = 0; i < c.in_time; ++i) {
      row[i] = clean[i][b].narrow(0, starts[b], T - starts[b]).unsqueeze(0);
    }
    const auto alone = c.reference(row, {});
    const auto o = padded.o[b].narrow(0, starts[b], T - starts[b]);
    expect_close(o, alone.o[0], relative, 0, fmt::format("row {}", b));
    expect_close(padded.state[b], alone.state[0], relative, 0, fmt::format("state of row {}", b));
    sum = sum + o.sum();
  }
  sum.backward();
  for (const auto& x : inputs) EXPECT_TRUE(x.grad().isfinite().all().item<bool>());
}

/// Cut into pieces, the last of single tokens, it goes on as if it were whole.
inline void expect_pieces_continue(const RecurrenceCase& c, double relative = 1e-11) {
  at::manual_seed(6);
  const auto inputs = c.make(2, 30);
  const auto whole = c.reference(inputs, {});
  ops::RecurrenceOptions options;
  Tensors parts;
  int64_t at = 0;
  for (const int64_t size : {13, 1, 11, 1, 1, 3}) {
    Tensors piece = inputs;
    for (size_t i = 0; i < c.in_time; ++i) piece[i] = inputs[i].narrow(1, at, size);
    const auto result = c.op(piece, options);
    parts.push_back(result.o);
    options.initial_state = result.state;
    at += size;
  }
  expect_close(at::cat(parts, 1), whole.o, relative, 0, "o of pieces");
  expect_close(*options.initial_state, whole.state, relative, 0, "state after pieces");
}

inline void expect_recurrence_refuses_misuse(const RecurrenceCase& c) {
  const auto inputs = c.make(1, 6);
  const auto complaint = [&](const ops::RecurrenceOptions& options, const std::vector<std::string>& parts) {
    expect_error([&] { c.op(inputs, options); }, parts);
  };
  complaint({.chunk_size = 0}, {"chunk_size is 0", "at least 1"});
  complaint({.cu_seqlens = at::tensor({0, 4}, at::kLong)}, {"cu_seqlens", "0 to 6"});
  complaint({.seq_start = at::tensor({7}, at::kLong)}, {"seq_start[0] is 7", "0 to 6"});
  const auto state = random_state(c, inputs);
  complaint({.initial_state = at::cat({state, state}, 1)}, {"initial_state has shape", "here ("});
  complaint({.cu_seqlens = at::tensor({0, 6}, at::kLong), .initial_state = state}, {"do not go together"});
}

}  // namespace fox::test
