#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/forgetting_attn.h"

// What the gates, the window, the padding and the documents say about which blocks of the attention matrix exist,
// worked out once before any tile is multiplied.
namespace fox::kernels {

inline constexpr int64_t kBlock = 64;  ///< queries and keys of a block
inline constexpr double kLog2e = 1.4426950408889634;
inline constexpr double kLn2 = 0.6931471805599453;

/// Queries and keys are cut on the same grid of positions, so that each block of queries has one diagonal key block.
struct ForgettingAttnPlan {
  int64_t q_offset = 0;  ///< position of query 0
  int64_t k_len = 0;
  int64_t q_blocks = 0;       ///< blocks of queries
  int64_t first_q_block = 0;  ///< grid index of the first of them
  int64_t window = 0;
  std::vector<double> gate_sum;    ///< (batch, heads, k_len) prefix sums of log_f in base 2; empty without gates
  std::vector<int32_t> segment;    ///< (batch, heads, k_len) first key that a position may see, window aside
  std::vector<int32_t> key_begin;  ///< (batch, heads, q_blocks) first key block to visit

  const double* gates(int64_t head) const { return gate_sum.empty() ? nullptr : gate_sum.data() + head * k_len; }
  const int32_t* segments(int64_t head) const { return segment.data() + head * k_len; }
  const int32_t* key_begins(int64_t head) const { return key_begin.data() + head * q_blocks; }

  int64_t diagonal(int64_t q_block) const { return first_q_block + q_block; }
  /// Positions of a block of queries: [q_begin, q_end).
  int64_t q_begin(int64_t q_block) const { return std::max(q_offset, diagonal(q_block) * kBlock); }
  int64_t q_end(int64_t q_block) const { return std::min(k_len, (diagonal(q_block) + 1) * kBlock); }
  /// First key that the query at `position` sees; above `position` if it sees none.
  int64_t first_key(const int32_t* segments, int64_t position) const {
    return std::max<int64_t>(segments[position], position - window + 1);
  }
};

/// `lse` of the rows (batch, heads, q_len), where it is known, lets pruning leave out more.
template <class T>
ForgettingAttnPlan make_plan(const ForgettingAttnParams<T>& params, const double* lse = nullptr);

}  // namespace fox::kernels
