// Forward of forgetting attention. One task is a block of 64 queries of one head: it walks its key blocks from the
// diagonal to the left, where decay only grows and the running maximum hardly ever does, with online softmax. A task
// writes only its own rows, so the result does not depend on the number of threads.
#include <hwy/aligned_allocator.h>
#include <omp.h>

#include <cmath>

#include "kernels/cpu/forgetting_attn.h"
#include "kernels/cpu/forgetting_attn_plan.h"
#include "kernels/cpu/simd.h"

// What the targets below share.
#ifndef FOX_KERNELS_CPU_FORGETTING_ATTN_FWD_SHARED_
#define FOX_KERNELS_CPU_FORGETTING_ATTN_FWD_SHARED_
namespace fox::kernels {

template <class T>
struct ForwardJob {
  const ForgettingAttnParams<T>& params;
  const ForgettingAttnOutput<T>& out;
  const ForgettingAttnPlan& plan;
  T* v;  // (batch, kv_heads, key blocks, 64, padded head_dim)
  int64_t key_blocks;
};

/// The steps as one instruction set does them.
template <class T>
struct ForwardSteps {
  int64_t (*width)(int64_t head_dim);
  void (*pack_values)(const ForwardJob<T>&, int64_t batch, int64_t kv_head, int64_t key_block);
  void (*task)(const ForwardJob<T>&, int64_t head, int64_t q_block, T* memory);
};

}  // namespace fox::kernels
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/forgetting_attn_fwd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/forgetting_attn_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

// The maximum that exponents are taken from may lag behind the true one by this much (in base 2): rescaling what was
// summed up is then rare, and numbers stay far from overflow.
constexpr double kLag = 8;

template <class T>
struct ForwardScratch {
  T* q;  // head_dim × 64, transposed
  T* s;  // 64 keys × 64 queries
  T* o;  // 64 × padded head_dim
  TileBias<T> bias;
  alignas(64) T query_bias[kBlock] = {};
  alignas(64) T max[kBlock];
  alignas(64) T sum[kBlock];
  alignas(64) T shrink[kBlock];
};

/// Turns the scores of a tile into weights relative to the running maximum. True if rows of o must shrink first.
template <bool kMasked, bool kDiagonal, class T>
HWY_NOINLINE bool softmax_tile(ForwardScratch<T>& x, const QueryBlock& block, double scale, int64_t keys) {
  const Tag<T> d;
  bool rescale = false;
  for (int64_t m = 0; m < block.rows; m += kLanes<T>) {
    // The products round rows up to kRows, so they read that far below the diagonal.
    const int64_t end = kDiagonal ? std::min(keys, m + kLanes<T> + block.offset + kRows) : keys;
    const Scores<kMasked, kDiagonal, T> scores(x.bias, scale, block.offset, m);
    T* s = x.s + m;
    auto top = hn::Neg(hn::Inf(d));
    for (int64_t n = 0; n < end; ++n) {
      const auto t = scores(s + n * kBlock, n);
      top = hn::Max(top, t);
      hn::Store(t, d, s + n * kBlock);
    }
    const auto own = kDiagonal ? hn::Zero(d) : hn::Load(d, x.query_bias + m);
    const auto before = hn::Load(d, x.max + m);
    top = hn::Add(top, own);
    const auto grows = hn::Gt(top, hn::Add(before, hn::Set(d, static_cast<T>(kLag))));
    const auto max = hn::IfThenElse(grows, top, before);
    auto sum = hn::Load(d, x.sum + m);
    if (!hn::AllFalse(d, grows)) {
      const auto shrink = hn::IfThenElse(grows, exp2(d, hn::Sub(before, max)), hn::Set(d, T(1)));
      sum = hn::Mul(sum, shrink);
      hn::Store(shrink, d, x.shrink + m);
      hn::Store(max, d, x.max + m);
      rescale = true;
    } else {
      hn::Store(hn::Set(d, T(1)), d, x.shrink + m);
    }
    // No key seen yet: the maximum is -inf and all t are, too.
    const auto shift = hn::IfThenElse(hn::Eq(max, hn::Neg(hn::Inf(d))), hn::Zero(d), hn::Sub(own, max));
    for (int64_t n = 0; n < end; ++n) {
      const auto p = exp2(d, hn::Add(hn::Load(d, s + n * kBlock), shift));
      sum = hn::Add(sum, p);
      hn::Store(p, d, s + n * kBlock);
    }
    hn::Store(sum, d, x.sum + m);
  }
  return rescale;
}

template <class T>
void shrink_rows(ForwardScratch<T>& x, int64_t rows, int64_t width) {
  const Tag<T> d;
  for (int64_t m = 0; m < rows; ++m) {
    if (x.shrink[m] == T(1)) continue;
    const auto factor = hn::Set(d, x.shrink[m]);
    T* o = x.o + m * width;
    for (int64_t i = 0; i < width; i += kLanes<T>) hn::Store(hn::Mul(hn::Load(d, o + i), factor), d, o + i);
  }
}

template <class T>
void store_rows(const ForwardJob<T>& job, const ForwardScratch<T>& x, int64_t head, const QueryBlock& block) {
  const auto& p = job.params;
  const int64_t width = padded_dim<T>(p.head_dim), b = head / p.heads, h = head % p.heads;
  for (int64_t m = 0; m < block.rows; ++m) {
    const int64_t row = block.position - job.plan.q_offset + m;
    T* o = job.out.o + ((b * p.q_len + row) * p.heads + h) * p.head_dim;
    const bool sees = m >= block.unseeing;
    const T inverse = T(1) / x.sum[m];
    for (int64_t i = 0; i < p.head_dim; ++i) o[i] = sees ? x.o[m * width + i] * inverse : T(0);
    job.out.lse[head * p.q_len + row] =
        sees ? (x.max[m] + std::log2(static_cast<double>(x.sum[m]))) * kLn2 : -std::numeric_limits<double>::infinity();
  }
}

template <class T>
void forward_task(const ForwardJob<T>& job, int64_t head, int64_t index, T* memory) {
  const auto& p = job.params;
  const int64_t width = padded_dim<T>(p.head_dim), b = head / p.heads, h = head % p.heads;
  const int64_t kv_head = h / (p.heads / p.kv_heads);
  const QueryBlock block = query_block(job.plan, head, index);
  ForwardScratch<T> x;
  x.s = memory;
  x.q = x.s + kBlock * kBlock;
  x.o = x.q + kBlock * width;
  const T* q =
      p.q + b * p.q_stride.batch + h * p.q_stride.head + (block.position - job.plan.q_offset) * p.q_stride.time;
  pack_block(q, p.q_stride.time, p.head_dim, block.unseeing, block.rows, x.o);
  transpose_block(x.o, width, p.head_dim, x.q);
  fill_query_bias(job.plan, head, block, x.query_bias);
  std::fill_n(x.max, kBlock, -std::numeric_limits<T>::infinity());
  std::fill_n(x.sum, kBlock, T(0));

  for (int64_t j = block.diagonal; j >= job.plan.key_begins(head)[index]; --j) {
    const int64_t keys = std::min(kBlock, p.k_len - j * kBlock);
    const bool diagonal = j == block.diagonal;
    const T* k = p.k + b * p.k_stride.batch + kv_head * p.k_stride.head + j * kBlock * p.k_stride.time;
    const T* v = job.v + ((b * p.kv_heads + kv_head) * job.key_blocks + j) * kBlock * width;
    multiply<false, T>({k, p.k_stride.time, x.q, kBlock, x.s, kBlock, keys, block.rows, p.head_dim, false,
                        diagonal ? Triangle::kOutput : Triangle::kNone, block.offset});
    x.bias.fill(job.plan, head, block, j);
    bool rescale = false;
    dispatch_tile(x.bias.masked, diagonal, [&]<bool kMasked, bool kDiagonal>() HWY_ATTR {
      rescale = softmax_tile<kMasked, kDiagonal>(x, block, p.scale, keys);
    });
    if (rescale && !diagonal) shrink_rows(x, block.rows, width);
    multiply<true, T>({x.s, kBlock, v, width, x.o, width, block.rows, p.head_dim, keys, !diagonal,
                       diagonal ? Triangle::kDepthBelow : Triangle::kNone, block.offset});
  }
  store_rows(job, x, head, block);
}

template <class T>
void pack_values(const ForwardJob<T>& job, int64_t b, int64_t kv_head, int64_t j) {
  const auto& p = job.params;
  const int64_t key = j * kBlock, padding = p.seq_start == nullptr ? 0 : p.seq_start[b];
  pack_block(p.v + b * p.v_stride.batch + kv_head * p.v_stride.head + key * p.v_stride.time, p.v_stride.time,
             p.head_dim, padding - key, std::min(kBlock, p.k_len - key),
             job.v + ((b * p.kv_heads + kv_head) * job.key_blocks + j) * kBlock * padded_dim<T>(p.head_dim));
}

template <class T>
ForwardSteps<T> forward_steps() {
  return {padded_dim<T>, pack_values<T>, forward_task<T>};
}
ForwardSteps<float> forward_steps_f32() { return forward_steps<float>(); }
ForwardSteps<double> forward_steps_f64() { return forward_steps<double>(); }

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

HWY_EXPORT(forward_steps_f32);
HWY_EXPORT(forward_steps_f64);

/// First key block that any query of the heads of a key head visits.
template <class T>
int64_t first_visited(const ForwardJob<T>& job, int64_t kv_head) {
  const int64_t group = job.params.heads / job.params.kv_heads;
  int64_t first = job.key_blocks;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    first = std::min<int64_t>(first, job.plan.key_begins(head)[0]);
  }
  return first;
}

template <class T>
void forward(const ForgettingAttnParams<T>& p, const ForgettingAttnOutput<T>& out, const ForwardSteps<T>& step) {
  const auto plan = make_plan(p);
  if (plan.q_blocks == 0) return;
  const int64_t key_blocks = (p.k_len + kBlock - 1) / kBlock, width = step.width(p.head_dim);
  const auto v = hwy::AllocateAligned<T>(std::max<int64_t>(1, p.batch * p.kv_heads * key_blocks * kBlock * width));
  const ForwardJob<T> job{p, out, plan, v.get(), key_blocks};
#pragma omp parallel num_threads(p.threads)
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < p.batch * p.kv_heads * key_blocks; ++n) {
      const int64_t kv_head = n / key_blocks, j = n % key_blocks;
      if (j >= first_visited(job, kv_head)) step.pack_values(job, kv_head / p.kv_heads, kv_head % p.kv_heads, j);
    }
    const auto memory = hwy::AllocateAligned<T>(kBlock * kBlock + 2 * kBlock * width);
    // Head by head, so that keys and values stay in cache; within a head the longest rows of blocks first, so that the
    // threads end together.
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < p.batch * p.heads * plan.q_blocks; ++task) {
      step.task(job, task / plan.q_blocks, plan.q_blocks - 1 - task % plan.q_blocks, memory.get());
    }
  }
}

}  // namespace

template <>
void forgetting_attn_forward(const ForgettingAttnParams<float>& params, const ForgettingAttnOutput<float>& out) {
  forward(params, out, HWY_DYNAMIC_DISPATCH(forward_steps_f32)());
}
template <>
void forgetting_attn_forward(const ForgettingAttnParams<double>& params, const ForgettingAttnOutput<double>& out) {
  forward(params, out, HWY_DYNAMIC_DISPATCH(forward_steps_f64)());
}

}  // namespace fox::kernels
#endif  // HWY_ONCE
