// Backward of forgetting attention. One task is a run of key blocks of one key head: for each of them it meets every
// block of queries that sees it, once, forms the weights again from the log-sum-exp and does all five matrix products
// of the tile. Gradients of keys and values stay with the task; those of queries go to a sum of their own for each run,
// and the runs are added up in order at the end. How many runs there are depends on the shape alone, so the result
// does not depend on the number of threads.
//
// d_log_f: with G = dL/dD, dL/dlog_f_t = Σ_{j < t <= i} G_ij = Σ_{i >= t} (Σ_j G_ij - Σ_j G_ji). The row sums Σ_j G_ij
// are 0 in exact arithmetic but must be kept: without them the rounding errors of all later rows pile up in the suffix
// sum, with them only those that reach across t do.
#include <hwy/aligned_allocator.h>
#include <omp.h>

#include <utility>

#include "kernels/cpu/forgetting_attn.h"
#include "kernels/cpu/forgetting_attn_plan.h"
#include "kernels/cpu/simd.h"

// What the targets below share.
#ifndef FOX_KERNELS_CPU_FORGETTING_ATTN_BWD_SHARED_
#define FOX_KERNELS_CPU_FORGETTING_ATTN_BWD_SHARED_
namespace fox::kernels {

template <class T>
struct BackwardJob {
  const ForgettingAttnParams<T>& params;
  const ForgettingAttnGrads<T>& grads;
  const ForgettingAttnPlan& plan;
  int64_t key_blocks, width, runs;
  std::vector<int64_t> run_begin;  // (batch, kv_heads, runs + 1) key blocks
  // Blocks of 64 rows, (batch, heads, q_blocks) or (batch, kv_heads, key_blocks); *_t are transposed.
  T *q, *q_t, *d_o, *d_o_t, *k, *v;
  T *lse, *lse_low, *delta;      // (batch, heads, q_blocks, 64), lse in base 2 as a sum of two numbers
  T* dq;                         // (runs, batch, heads, q_blocks, 64, width)
  std::vector<char> dq_written;  // (runs, batch, heads, q_blocks)
  std::vector<double> row_sum;   // (runs, batch, heads, q_blocks, 64)
  std::vector<double> col_sum;   // (batch, heads, key_blocks, 64)

  int64_t heads() const { return params.batch * params.heads; }
  int64_t kv_heads() const { return params.batch * params.kv_heads; }
  int64_t group() const { return params.heads / params.kv_heads; }
  /// Number of a block of queries among all of a run (-1 run: among all).
  int64_t q_index(int64_t head, int64_t i, int64_t run = 0) const { return (run * heads() + head) * plan.q_blocks + i; }
  int64_t k_index(int64_t kv_head, int64_t j) const { return kv_head * key_blocks + j; }
};

/// The steps as one instruction set does them.
template <class T>
struct BackwardSteps {
  int64_t (*width)(int64_t head_dim);
  void (*pack_queries)(BackwardJob<T>&, int64_t head, int64_t q_block);
  void (*pack_keys)(BackwardJob<T>&, int64_t kv_head, int64_t key_block);
  void (*run)(BackwardJob<T>&, int64_t kv_head, int64_t run, T* memory);
  void (*store_dq)(const BackwardJob<T>&, int64_t head, int64_t q_block);
};

}  // namespace fox::kernels
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/forgetting_attn_bwd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/forgetting_attn_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
struct BackwardScratch {
  T* p;   // 64 keys × 64 queries: scores, then weights
  T* ds;  // the same of dL/dP, then dL/dD
  T* dk;  // 64 × width
  T* dv;
  TileBias<T> bias;
  alignas(64) T query_bias[kBlock] = {};
};

template <bool kMasked, bool kDiagonal, class T>
HWY_NOINLINE void weights_tile(BackwardScratch<T>& x, const QueryBlock& block, double scale, int64_t keys, const T* lse,
                               const T* lse_low, const T* delta, double* row_sum) {
  const Tag<T> d;
  for (int64_t m = 0; m < block.rows; m += kLanes<T>) {
    // The products round rows up to kRows, so they read that far below the diagonal.
    const int64_t end = kDiagonal ? std::min(keys, m + kLanes<T> + block.offset + kRows) : keys;
    const Scores<kMasked, kDiagonal, T> scores(x.bias, scale, block.offset, m);
    const auto own = kDiagonal ? hn::Zero(d) : hn::Load(d, x.query_bias + m);
    const auto row_lse = hn::Load(d, lse + m), shift = hn::Sub(own, hn::Load(d, lse_low + m));
    const auto row_delta = hn::Load(d, delta + m);
    auto sum = hn::Zero(d);
    for (int64_t n = 0; n < end; ++n) {
      T* p_at = x.p + n * kBlock + m;
      T* ds_at = x.ds + n * kBlock + m;
      const auto p = exp2(d, hn::Add(hn::Sub(scores(p_at, n), row_lse), shift));
      auto ds = hn::Mul(p, hn::Sub(hn::Load(d, ds_at), row_delta));
      // Above the diagonal dP was not computed: what lies there may be anything.
      if constexpr (kDiagonal) ds = hn::IfThenZeroElse(hn::Eq(p, hn::Zero(d)), ds);
      sum = hn::Add(sum, ds);
      hn::Store(p, d, p_at);
      hn::Store(ds, d, ds_at);
    }
    alignas(64) T sums[kLanes<T>];
    hn::Store(sum, d, sums);
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) row_sum[m + lane] += sums[lane];
  }
}

template <class T>
void add_column_sums(const BackwardScratch<T>& x, const QueryBlock& block, bool diagonal, int64_t keys, double* sums) {
  const Tag<T> d;
  for (int64_t n = 0; n < keys; ++n) {
    auto sum = hn::Zero(d);
    int64_t m = diagonal ? std::max<int64_t>(0, n - block.offset) / kLanes<T> * kLanes<T> : 0;
    for (; m < block.rows; m += kLanes<T>) sum = hn::Add(sum, hn::Load(d, x.ds + n * kBlock + m));
    sums[n] += hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

template <class T>
void backward_tile(BackwardJob<T>& job, BackwardScratch<T>& x, int64_t head, int64_t i, int64_t kv_head, int64_t j,
                   int64_t run, bool first) {
  const auto& p = job.params;
  const int64_t width = job.width, size = kBlock * width;
  const QueryBlock block = query_block(job.plan, head, i);
  const int64_t keys = std::min(kBlock, p.k_len - j * kBlock), q_at = job.q_index(head, i),
                k_at = job.k_index(kv_head, j);
  const bool diagonal = j == block.diagonal;
  const auto triangle = [&](Triangle t) { return diagonal ? t : Triangle::kNone; };
  const T *k = job.k + k_at * size, *v = job.v + k_at * size, *q = job.q + q_at * size, *d_o = job.d_o + q_at * size;

  multiply<false, T>({k, width, job.q_t + q_at * size, kBlock, x.p, kBlock, keys, block.rows, p.head_dim, false,
                      triangle(Triangle::kOutput), block.offset});
  multiply<false, T>({v, width, job.d_o_t + q_at * size, kBlock, x.ds, kBlock, keys, block.rows, p.head_dim, false,
                      triangle(Triangle::kOutput), block.offset});
  x.bias.fill(job.plan, head, block, j);
  fill_query_bias(job.plan, head, block, x.query_bias);
  double* row_sum = job.row_sum.data() + job.q_index(head, i, run) * kBlock;
  dispatch_tile(x.bias.masked, diagonal, [&]<bool kMasked, bool kDiagonal>() HWY_ATTR {
    weights_tile<kMasked, kDiagonal>(x, block, p.scale, keys, job.lse + q_at * kBlock, job.lse_low + q_at * kBlock,
                                     job.delta + q_at * kBlock, row_sum);
  });
  if (p.log_f != nullptr) {
    add_column_sums(x, block, diagonal, keys, job.col_sum.data() + (head * job.key_blocks + j) * kBlock);
  }
  multiply<false, T>({x.p, kBlock, d_o, width, x.dv, width, keys, p.head_dim, block.rows, !first,
                      triangle(Triangle::kDepthAbove), block.offset});
  multiply<false, T>({x.ds, kBlock, q, width, x.dk, width, keys, p.head_dim, block.rows, !first,
                      triangle(Triangle::kDepthAbove), block.offset});
  const int64_t part = job.q_index(head, i, run);
  multiply<true, T>({x.ds, kBlock, k, width, job.dq + part * size, width, block.rows, p.head_dim, keys,
                     job.dq_written[part] != 0, triangle(Triangle::kDepthBelow), block.offset});
  job.dq_written[part] = 1;
}

template <class T>
void backward_run(BackwardJob<T>& job, int64_t kv_head, int64_t run, T* memory) {
  const auto& p = job.params;
  const int64_t width = job.width, size = kBlock * width;
  BackwardScratch<T> x;
  x.p = memory;
  x.ds = x.p + kBlock * kBlock;
  x.dk = x.ds + kBlock * kBlock;
  x.dv = x.dk + size;
  const int64_t* bounds = job.run_begin.data() + kv_head * (job.runs + 1) + run;
  for (int64_t j = bounds[0]; j < bounds[1]; ++j) {
    bool first = true;
    for (int64_t head = kv_head * job.group(); head < (kv_head + 1) * job.group(); ++head) {
      const int32_t* begin = job.plan.key_begins(head);
      for (int64_t i = std::max<int64_t>(0, j - job.plan.first_q_block); i < job.plan.q_blocks && begin[i] <= j; ++i) {
        backward_tile(job, x, head, i, kv_head, j, run, first);
        first = false;
      }
    }
    const int64_t keys = std::min(kBlock, p.k_len - j * kBlock), b = kv_head / p.kv_heads, h = kv_head % p.kv_heads;
    for (int64_t n = 0; n < keys; ++n) {
      const int64_t at = ((b * p.k_len + j * kBlock + n) * p.kv_heads + h) * p.head_dim;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        job.grads.dk[at + c] = first ? T(0) : x.dk[n * width + c] * static_cast<T>(p.scale);
        job.grads.dv[at + c] = first ? T(0) : x.dv[n * width + c];
      }
    }
  }
}

/// Queries and what backward knows of them, packed.
template <class T>
void pack_queries(BackwardJob<T>& job, int64_t head, int64_t i) {
  const auto& p = job.params;
  const int64_t width = job.width, b = head / p.heads, h = head % p.heads, at = job.q_index(head, i);
  const QueryBlock block = query_block(job.plan, head, i);
  const int64_t row = block.position - job.plan.q_offset, out_stride = p.heads * p.head_dim;
  const int64_t out_at = ((b * p.q_len + row) * p.heads + h) * p.head_dim;
  T *q = job.q + at * kBlock * width, *d_o = job.d_o + at * kBlock * width;
  T *q_t = job.q_t + at * kBlock * width, *d_o_t = job.d_o_t + at * kBlock * width;
  pack_block(job.grads.d_o + out_at, out_stride, p.head_dim, block.unseeing, block.rows, d_o);
  transpose_block(d_o, width, p.head_dim, d_o_t);
  // Δ = o·dO, added up in the order in which multiply adds up dP = v·dO: where a query sees itself alone, o = v and
  // dP - Δ is exactly 0. The place of q serves o first.
  pack_block(job.grads.o + out_at, out_stride, p.head_dim, block.unseeing, block.rows, q);
  transpose_block(q, width, p.head_dim, q_t);
  const Tag<T> d;
  for (int64_t m = 0; m < kBlock; m += kLanes<T>) {
    auto delta = hn::Zero(d);
    for (int64_t c = 0; c < p.head_dim; ++c) {
      delta = hn::MulAdd(hn::Load(d, q_t + c * kBlock + m), hn::Load(d, d_o_t + c * kBlock + m), delta);
    }
    hn::Store(delta, d, job.delta + at * kBlock + m);
  }
  pack_block(p.q + b * p.q_stride.batch + h * p.q_stride.head + row * p.q_stride.time, p.q_stride.time, p.head_dim,
             block.unseeing, block.rows, q);
  transpose_block(q, width, p.head_dim, q_t);
  for (int64_t m = 0; m < kBlock; ++m) {
    // Rows that see nothing get weights 2^(-huge) = 0.
    const bool sees = m >= block.unseeing && m < block.rows;
    const double lse = sees ? job.grads.lse[head * p.q_len + row + m] * kLog2e : std::numeric_limits<T>::max();
    T& high = job.lse[at * kBlock + m];
    high = static_cast<T>(lse);
    job.lse_low[at * kBlock + m] = static_cast<T>(lse - high);
  }
}

template <class T>
void pack_keys(BackwardJob<T>& job, int64_t kv_head, int64_t j) {
  const auto& p = job.params;
  const int64_t b = kv_head / p.kv_heads, h = kv_head % p.kv_heads, key = j * kBlock;
  const int64_t padding = p.seq_start == nullptr ? 0 : p.seq_start[b], keys = std::min(kBlock, p.k_len - key);
  const int64_t to = job.k_index(kv_head, j) * kBlock * job.width;
  pack_block(p.k + b * p.k_stride.batch + h * p.k_stride.head + key * p.k_stride.time, p.k_stride.time, p.head_dim,
             padding - key, keys, job.k + to);
  pack_block(p.v + b * p.v_stride.batch + h * p.v_stride.head + key * p.v_stride.time, p.v_stride.time, p.head_dim,
             padding - key, keys, job.v + to);
}

/// Adds up the runs' gradients of a block of queries.
template <class T>
void store_dq(const BackwardJob<T>& job, int64_t head, int64_t i) {
  const auto& p = job.params;
  const QueryBlock block = query_block(job.plan, head, i);
  const int64_t b = head / p.heads, h = head % p.heads, row = block.position - job.plan.q_offset;
  for (int64_t m = 0; m < block.rows; ++m) {
    T* out = job.grads.dq + ((b * p.q_len + row + m) * p.heads + h) * p.head_dim;
    std::fill_n(out, p.head_dim, T(0));
    for (int64_t run = 0; run < job.runs; ++run) {
      const int64_t part = job.q_index(head, i, run);
      if (!job.dq_written[part]) continue;
      const T* dq = job.dq + (part * kBlock + m) * job.width;
      for (int64_t c = 0; c < p.head_dim; ++c) out[c] += dq[c] * static_cast<T>(p.scale);
    }
  }
}

template <class T>
BackwardSteps<T> backward_steps() {
  return {padded_dim<T>, pack_queries<T>, pack_keys<T>, backward_run<T>, store_dq<T>};
}
BackwardSteps<float> backward_steps_f32() { return backward_steps<float>(); }
BackwardSteps<double> backward_steps_f64() { return backward_steps<double>(); }

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

// Tasks to aim for: few, since each run of a head has a gradient of its queries of its own, yet enough for the threads
// of a small machine to end together.
constexpr int64_t kTasks = 16;

HWY_EXPORT(backward_steps_f32);
HWY_EXPORT(backward_steps_f64);

/// Cuts the key blocks of each key head into runs that meet about equally many blocks of queries.
template <class T>
void cut_runs(BackwardJob<T>& job) {
  job.run_begin.assign(job.kv_heads() * (job.runs + 1), job.key_blocks);
  std::vector<int64_t> met(job.key_blocks + 1);  // blocks of queries met by the key blocks before j
  for (int64_t kv_head = 0; kv_head < job.kv_heads(); ++kv_head) {
    for (int64_t j = 0; j < job.key_blocks; ++j) {
      met[j + 1] = met[j];
      for (int64_t head = kv_head * job.group(); head < (kv_head + 1) * job.group(); ++head) {
        const int32_t* begin = job.plan.key_begins(head);
        const int64_t first = std::max<int64_t>(0, j - job.plan.first_q_block);
        const auto last = std::upper_bound(begin, begin + job.plan.q_blocks, static_cast<int32_t>(j)) - begin;
        met[j + 1] += std::max<int64_t>(0, last - first);
      }
    }
    int64_t* bounds = job.run_begin.data() + kv_head * (job.runs + 1);
    bounds[0] = 0;
    for (int64_t run = 1; run < job.runs; ++run) {
      const int64_t share = met[job.key_blocks] * run / job.runs;
      bounds[run] = std::max<int64_t>(bounds[run - 1], std::lower_bound(met.begin(), met.end(), share) - met.begin());
    }
  }
}

template <class T>
void store_d_log_f(const BackwardJob<T>& job, int64_t head) {
  const auto& p = job.params;
  const int32_t* segments = job.plan.segments(head);
  const int64_t grid = job.plan.first_q_block * kBlock, b = head / p.heads, h = head % p.heads;
  double suffix = 0;
  for (int64_t t = p.k_len - 1; t >= 0; --t) {
    suffix -= job.col_sum[head * job.key_blocks * kBlock + t];
    for (int64_t run = 0; t >= job.plan.q_offset && run < job.runs; ++run) {
      const int64_t position = t - grid, i = position / kBlock;
      suffix += job.row_sum[job.q_index(head, i, run) * kBlock + t - job.plan.q_begin(i)];
    }
    // Nothing reaches across the start of a segment: the sum is 0 there but for rounding.
    if (segments[t] >= t) suffix = 0;
    job.grads.d_log_f[(b * p.k_len + t) * p.heads + h] = static_cast<T>(suffix);
  }
}

template <class T>
void backward(const ForgettingAttnParams<T>& p, const ForgettingAttnGrads<T>& grads, const BackwardSteps<T>& step) {
  const auto plan = make_plan(p, grads.lse);
  BackwardJob<T> job{p,
                     grads,
                     plan,
                     (p.k_len + kBlock - 1) / kBlock,
                     step.width(p.head_dim),
                     1,
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {},
                     {}};
  const int64_t heads = job.heads(), kv_heads = job.kv_heads(), q_blocks = heads * plan.q_blocks;
  job.runs = std::clamp<int64_t>((kTasks + kv_heads - 1) / std::max<int64_t>(kv_heads, 1), 1,
                                 std::max<int64_t>(job.key_blocks, 1));
  cut_runs(job);
  const int64_t size = kBlock * job.width, q_size = q_blocks * size, k_size = kv_heads * job.key_blocks * size;
  const int64_t numbers = (4 + job.runs) * q_size + 2 * k_size + 3 * q_blocks * kBlock;
  const auto memory = hwy::AllocateAligned<T>(std::max<int64_t>(1, numbers));
  T* at = memory.get();
  for (T** part : {&job.q, &job.q_t, &job.d_o, &job.d_o_t}) *part = std::exchange(at, at + q_size);
  for (T** part : {&job.k, &job.v}) *part = std::exchange(at, at + k_size);
  for (T** part : {&job.lse, &job.lse_low, &job.delta}) *part = std::exchange(at, at + q_blocks * kBlock);
  job.dq = at;
  job.dq_written.assign(job.runs * q_blocks, 0);
  job.row_sum.assign(job.runs * q_blocks * kBlock, 0);
  job.col_sum.assign(heads * job.key_blocks * kBlock, 0);
#pragma omp parallel num_threads(p.threads)
  {
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < q_blocks; ++n) step.pack_queries(job, n / plan.q_blocks, n % plan.q_blocks);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < kv_heads * job.key_blocks; ++n) step.pack_keys(job, n / job.key_blocks, n % job.key_blocks);
    const auto scratch = hwy::AllocateAligned<T>(2 * kBlock * kBlock + 2 * size);
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < kv_heads * job.runs; ++n) step.run(job, n / job.runs, n % job.runs, scratch.get());
#pragma omp for schedule(static) nowait
    for (int64_t n = 0; n < q_blocks; ++n) step.store_dq(job, n / plan.q_blocks, n % plan.q_blocks);
#pragma omp for schedule(static)
    for (int64_t head = 0; head < (p.log_f == nullptr ? 0 : heads); ++head) store_d_log_f(job, head);
  }
}

}  // namespace

template <>
void forgetting_attn_backward(const ForgettingAttnParams<float>& params, const ForgettingAttnGrads<float>& grads) {
  backward(params, grads, HWY_DYNAMIC_DISPATCH(backward_steps_f32)());
}
template <>
void forgetting_attn_backward(const ForgettingAttnParams<double>& params, const ForgettingAttnGrads<double>& grads) {
  backward(params, grads, HWY_DYNAMIC_DISPATCH(backward_steps_f64)());
}

}  // namespace fox::kernels
#endif  // HWY_ONCE
