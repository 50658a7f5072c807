// What the queries of a block bring to every tile they meet, in base 2, included once for each instruction set.
//
// With c the prefix sums of log f, a score is t = q·k σ + c_i - c_j, σ = scale log2(e). Sums reach 1e5 and more while
// differences of neighbours must keep all digits, so c itself is never rounded: everything is counted from the first
// query of the block. Off the diagonal the key's part is one number for the row of the tile and the query's part joins
// the running maximum, which costs nothing; on the diagonal, where both may be huge and their difference small, the
// differences are formed from pairs of numbers (high + low).
#if defined(FOX_KERNELS_CPU_FORGETTING_ATTN_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOX_KERNELS_CPU_FORGETTING_ATTN_ROWS_INL_H_
#undef FOX_KERNELS_CPU_FORGETTING_ATTN_ROWS_INL_H_
#else
#define FOX_KERNELS_CPU_FORGETTING_ATTN_ROWS_INL_H_
#endif

#include "kernels/cpu/forgetting_attn_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// A block of queries.
struct QueryBlock {
  int64_t position;  ///< of the first query
  int64_t rows;
  int64_t diagonal;  ///< its key block on the diagonal
  int64_t offset;    ///< of its first query within that block
  int64_t unseeing;  ///< first rows that lie in the padding and see no key
};

inline QueryBlock query_block(const ForgettingAttnPlan& plan, int64_t head, int64_t index) {
  QueryBlock block;
  block.position = plan.q_begin(index);
  block.rows = plan.q_end(index) - block.position;
  block.diagonal = plan.diagonal(index);
  block.offset = block.position - block.diagonal * kBlock;
  const int32_t* segments = plan.segments(head) + block.position;
  block.unseeing = 0;
  while (block.unseeing < block.rows && segments[block.unseeing] > block.position + block.unseeing) ++block.unseeing;
  return block;
}

/// The biases of one tile and its mask.
template <class T>
struct TileBias {
  // Keys of the tile; on the diagonal the queries are among them. Twice the block: loads may start within it.
  alignas(64) T high[2 * kBlock] = {};
  alignas(64) T low[2 * kBlock] = {};
  alignas(64) T first[kBlock] = {};  ///< first visible row of the tile, of each query
  bool masked = false;

  /// For the keys of block `j` against `block`; `gates` may be null.
  void fill(const ForgettingAttnPlan& plan, int64_t head, const QueryBlock& block, int64_t j) {
    const int64_t key = j * kBlock, keys = std::min(kBlock, plan.k_len - key);
    if (const double* gates = plan.gates(head)) {
      // Off the diagonal a key's bias is c_ref - c_j; on it only differences count, so the sign may be the other.
      const double reference = gates[block.position];
      for (int64_t n = 0; n < keys; ++n) {
        const double x = gates[key + n] - reference;
        high[n] = static_cast<T>(x);
        low[n] = static_cast<T>(x - static_cast<double>(high[n]));
      }
    }
    const int32_t* segments = plan.segments(head);
    masked = plan.first_key(segments, block.position + block.rows - 1) > key;
    if (!masked && j != block.diagonal) return;
    for (int64_t m = 0; m < block.rows; ++m) {
      first[m] = static_cast<T>(std::clamp<int64_t>(plan.first_key(segments, block.position + m) - key, 0, kBlock));
    }
  }
};

/// Scores t of one row of a tile (one key `n`, a vector of queries from column m on), without the query's own part
/// off the diagonal; -inf where the query does not see the key.
template <bool kMasked, bool kDiagonal, class T>
struct Scores {
  const TileBias<T>& bias;
  hn::Vec<Tag<T>> sigma, query_high, query_low, first, last;

  HWY_INLINE Scores(const TileBias<T>& tile, double scale, int64_t offset, int64_t m) : bias(tile) {
    const Tag<T> d;
    sigma = hn::Set(d, static_cast<T>(scale * kLog2e));
    query_high = hn::LoadU(d, bias.high + offset + m);
    query_low = hn::LoadU(d, bias.low + offset + m);
    first = hn::LoadU(d, bias.first + m);
    last = hn::Add(hn::Iota(d, static_cast<T>(m)), hn::Set(d, static_cast<T>(offset)));
  }

  HWY_INLINE hn::Vec<Tag<T>> operator()(const T* s, int64_t n) const {
    const Tag<T> d;
    const auto high = hn::Set(d, bias.high[n]);
    hn::Vec<Tag<T>> t;
    if constexpr (kDiagonal) {
      const auto decay = hn::Add(hn::Sub(query_high, high), hn::Sub(query_low, hn::Set(d, bias.low[n])));
      t = hn::MulAdd(hn::LoadU(d, s), sigma, decay);
    } else {
      t = hn::MulSub(hn::LoadU(d, s), sigma, high);
    }
    if constexpr (!kMasked) return t;
    const auto row = hn::Set(d, static_cast<T>(n));
    auto visible = hn::Ge(row, first);
    if constexpr (kDiagonal) visible = hn::And(visible, hn::Le(row, last));
    return hn::IfThenElse(visible, t, hn::Neg(hn::Inf(d)));
  }
};

/// Calls f.operator()<kMasked, kDiagonal>() as the tile needs.
template <class F>
HWY_INLINE void dispatch_tile(bool masked, bool diagonal, const F& f) {
  if (diagonal) {
    f.template operator()<true, true>();
  } else if (masked) {
    f.template operator()<true, false>();
  } else {
    f.template operator()<false, false>();
  }
}

/// The queries' own part of the bias, c_i - c_ref: 0 without gates.
template <class T>
void fill_query_bias(const ForgettingAttnPlan& plan, int64_t head, const QueryBlock& block, T* bias) {
  const double* gates = plan.gates(head);
  for (int64_t m = 0; m < block.rows; ++m) {
    bias[m] = gates == nullptr ? T(0) : static_cast<T>(gates[block.position + m] - gates[block.position]);
  }
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
