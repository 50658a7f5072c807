#include "kernels/cpu/forgetting_attn_plan.h"

#include <cmath>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/forgetting_attn_plan.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
double largest_norm(const T* x, int64_t rows, int64_t stride, int64_t dim) {
  const hn::ScalableTag<T> d;
  double largest = 0;
  for (int64_t r = 0; r < rows; ++r) {
    auto sum = hn::Zero(d);
    for_each_vector<T>(dim, [&](const auto& io, int64_t i) HWY_ATTR {
      const auto v = io.load(x + r * stride + i);
      sum = hn::MulAdd(v, v, sum);
    });
    largest = std::max<double>(largest, sum_of_lanes(d, sum));
  }
  return std::sqrt(largest);
}

double largest_norm_f32(const float* x, int64_t rows, int64_t stride, int64_t dim) {
  return largest_norm(x, rows, stride, dim);
}
double largest_norm_f64(const double* x, int64_t rows, int64_t stride, int64_t dim) {
  return largest_norm(x, rows, stride, dim);
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

// A gate below this is a hard reset, like -inf: nothing before it can weigh anything, and leaving it out of the prefix
// sums keeps their digits for the gates after it.
constexpr double kHardReset = -1e6;

HWY_EXPORT(largest_norm_f32);
HWY_EXPORT(largest_norm_f64);

double largest_norm(const float* x, int64_t rows, int64_t stride, int64_t dim) {
  return HWY_DYNAMIC_DISPATCH(largest_norm_f32)(x, rows, stride, dim);
}
double largest_norm(const double* x, int64_t rows, int64_t stride, int64_t dim) {
  return HWY_DYNAMIC_DISPATCH(largest_norm_f64)(x, rows, stride, dim);
}

template <class T>
int64_t padding(const ForgettingAttnParams<T>& p, int64_t batch) {
  return p.seq_start == nullptr ? 0 : std::min(p.seq_start[batch], p.k_len);
}

template <class T>
void fill_segments(const ForgettingAttnParams<T>& p, int64_t b, int64_t h, ForgettingAttnPlan& plan) {
  int32_t* segment = plan.segment.data() + (b * p.heads + h) * p.k_len;
  double* sums = p.log_f == nullptr ? nullptr : plan.gate_sum.data() + (b * p.heads + h) * p.k_len;
  const T* log_f = p.log_f + b * p.log_f_stride.batch + h * p.log_f_stride.head;
  const int64_t begin = padding(p, b);
  int64_t document = 0, start = begin;
  double sum = 0;
  for (int64_t t = 0; t < p.k_len; ++t) {
    if (t >= begin) {
      const double gate = p.log_f == nullptr ? 0 : static_cast<double>(log_f[t * p.log_f_stride.time]);
      // Empty documents share their boundary with the next one.
      while (document < p.documents && p.cu_seqlens[document] <= t) start = p.cu_seqlens[document++];
      if (gate < kHardReset) start = t;
      if (start < t) sum += gate * kLog2e;
    }
    segment[t] = static_cast<int32_t>(start);
    if (sums != nullptr) sums[t] = sum;
  }
}

template <class T>
bool is_pruned(const ForgettingAttnParams<T>& p) {
  return p.log_f != nullptr && p.log_pruning_tolerance > -std::numeric_limits<double>::infinity();
}

/// Bound of |logits| of a head.
template <class T>
double logit_bound(const ForgettingAttnParams<T>& p, int64_t b, int64_t h) {
  constexpr double kRounding = 1 + 1e-4;  // norms and logits are rounded
  if (p.logit_bound != nullptr) return kRounding * p.logit_bound[h];
  const int64_t begin = padding(p, b), q_offset = p.k_len - p.q_len;
  const int64_t q_begin = std::max<int64_t>(begin - q_offset, 0), kv_head = h / (p.heads / p.kv_heads);
  const T* q = p.q + b * p.q_stride.batch + h * p.q_stride.head + q_begin * p.q_stride.time;
  const T* k = p.k + b * p.k_stride.batch + kv_head * p.k_stride.head + begin * p.k_stride.time;
  return kRounding * std::abs(p.scale) * largest_norm(q, p.q_len - q_begin, p.q_stride.time, p.head_dim) *
         largest_norm(k, p.k_len - begin, p.k_stride.time, p.head_dim);
}

// For logits of at most U keys up to e hold of row i's weights at most the share
//
//   exp(2U) Σ_{j<=e} exp(-c_j) / Σ_{j<=i} exp(-c_j),  and where lse_i is known
//   exp(U) Σ_{j<=e} exp(-c_j) / exp(lse_i - c_i):
//
// a product of a mark of e and one of i, here in log2. Blocks go while that is below ε. Sums are over what the row
// sees, but for a window: there its own key stands for the second.
struct PruningMarks {
  std::vector<double> keys;  // by key block, of its last key
  std::vector<double> rows;  // by query block
};

template <class T>
PruningMarks decay_marks(const ForgettingAttnParams<T>& p, int64_t b, const int32_t* segments, const double* sums,
                         const ForgettingAttnPlan& plan) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  PruningMarks marks{std::vector<double>(plan.k_len / kBlock, kNone), std::vector<double>(plan.q_blocks, kNone)};
  double mass = 0;  // Σ_j 2^(c_t - c_j) over the keys up to t in t's document
  for (int64_t t = padding(p, b); t < plan.k_len; ++t) {
    mass = segments[t] == t ? 1 : 1 + mass * std::exp2(sums[t] - sums[t - 1]);
    if ((t + 1) % kBlock == 0) marks.keys[t / kBlock] = std::log2(mass) - sums[t];
    const int64_t q_block = t / kBlock - plan.first_q_block;
    if (q_block < 0 || t != plan.q_begin(q_block)) continue;
    marks.rows[q_block] = (plan.first_key(segments, t) == segments[t] ? std::log2(mass) : 0) - sums[t];
  }
  return marks;
}

// The least of each block's rows, and of all behind it: key_begin must not fall. NaN leaves nothing out.
void mark_rows_by_lse(const double* lse, const double* sums, const ForgettingAttnPlan& plan, PruningMarks& marks) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double least = kInfinity;
  for (int64_t i = plan.q_blocks - 1; i >= 0; --i) {
    for (int64_t t = plan.q_begin(i); t < plan.q_end(i); ++t) {
      const double lse_t = lse[t - plan.q_offset];
      if (lse_t == -kInfinity) continue;  // sees nothing
      least = std::isnan(lse_t) ? -kInfinity : std::min(least, lse_t * kLog2e - sums[t]);
    }
    marks.rows[i] = least;
  }
}

template <class T>
void fill_key_begin(const ForgettingAttnParams<T>& p, int64_t b, int64_t h, const double* lse,
                    ForgettingAttnPlan& plan) {
  constexpr double kLseError = 1.0 / 256;  // generous: sums in float32
  const int64_t head = b * p.heads + h;
  const int32_t* segments = plan.segments(head);
  const double* sums = plan.gates(head);
  PruningMarks marks;
  double share = -std::numeric_limits<double>::infinity();
  if (is_pruned(p)) {
    marks = decay_marks(p, b, segments, sums, plan);
    if (lse != nullptr) mark_rows_by_lse(lse + head * p.q_len, sums, plan, marks);
    const double bound = logit_bound(p, b, h);
    share = kLog2e * (p.log_pruning_tolerance - (lse != nullptr ? bound + kLseError : 2 * bound));
  }
  // Never moves back: keys that a segment or a window no longer reaches leave both sums, which only lowers a share.
  int64_t block = 0;
  for (int64_t i = 0; i < plan.q_blocks; ++i) {
    const int64_t row = plan.q_begin(i), diagonal = plan.diagonal(i);
    block = std::min(std::max(block, plan.first_key(segments, row) / kBlock), diagonal);
    while (is_pruned(p) && block < diagonal && marks.keys[block] < marks.rows[i] + share) ++block;
    plan.key_begin[head * plan.q_blocks + i] = static_cast<int32_t>(block);
  }
}

}  // namespace

template <class T>
BadGate find_bad_gate(const ForgettingAttnParams<T>& p) {
  if (p.log_f == nullptr) return {};
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t t = padding(p, b); t < p.k_len; ++t) {
      const T* row = p.log_f + b * p.log_f_stride.batch + t * p.log_f_stride.time;
      for (int64_t h = 0; h < p.heads; ++h) {
        const T gate = row[h * p.log_f_stride.head];
        if (!(gate <= 0)) return {b, t, h, static_cast<double>(gate)};
      }
    }
  }
  return {};
}

template <class T>
ForgettingAttnPlan make_plan(const ForgettingAttnParams<T>& p, const double* lse) {
  ForgettingAttnPlan plan;
  plan.k_len = p.k_len;
  plan.q_offset = p.k_len - p.q_len;
  plan.first_q_block = plan.q_offset / kBlock;
  plan.q_blocks = p.q_len == 0 ? 0 : (p.k_len + kBlock - 1) / kBlock - plan.first_q_block;
  plan.window = std::min(p.window, p.k_len);
  const int64_t heads = p.batch * p.heads;
  if (p.log_f != nullptr) plan.gate_sum.resize(heads * p.k_len);
  plan.segment.resize(heads * p.k_len);
  plan.key_begin.resize(heads * plan.q_blocks);
  // Waking threads for less than some 10 µs of work costs more than it saves.
  parallel_pieces(heads, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, p.k_len)),
                  [&](int64_t begin, int64_t end, int64_t) {
                    for (int64_t head = begin; head < end; ++head) {
                      fill_segments(p, head / p.heads, head % p.heads, plan);
                      fill_key_begin(p, head / p.heads, head % p.heads, lse, plan);
                    }
                  });
  return plan;
}

template <class T>
std::vector<double> forgetting_attn_kept_share(const ForgettingAttnParams<T>& p) {
  const auto plan = make_plan(p);
  std::vector<double> share(p.batch * p.heads);
  for (int64_t head = 0; head < p.batch * p.heads; ++head) {
    int64_t kept = 0, causal = 0;
    for (int64_t i = 0; i < plan.q_blocks; ++i) {
      kept += plan.diagonal(i) + 1 - plan.key_begins(head)[i];
      causal += plan.diagonal(i) + 1;
    }
    share[head] = causal == 0 ? 1 : static_cast<double>(kept) / static_cast<double>(causal);
  }
  return share;
}

template BadGate find_bad_gate(const ForgettingAttnParams<float>&);
template BadGate find_bad_gate(const ForgettingAttnParams<double>&);
template ForgettingAttnPlan make_plan(const ForgettingAttnParams<float>&, const double*);
template ForgettingAttnPlan make_plan(const ForgettingAttnParams<double>&, const double*);
template std::vector<double> forgetting_attn_kept_share(const ForgettingAttnParams<float>&);
template std::vector<double> forgetting_attn_kept_share(const ForgettingAttnParams<double>&);

}  // namespace fox::kernels
#endif  // HWY_ONCE
