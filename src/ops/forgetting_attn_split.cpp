// Why keys are gathered a slice of heads at a time instead of attending to one rank's part after another: what a rank's
// queries see then lies in one piece, so that the operator of one device does all the work, pruning and the sums of
// gates included, as it stands. There are no partial outputs to merge by their log-sum-exp (and to round), no kernel
// for queries that stand after all keys, and pruning cuts at blocks of keys, not at whole parts. A slice has 1 / P of
// the heads and P times the keys of a part: the same memory and the same bytes on the wire. The next slice is under way
// while one is computed.
#include "ops/forgetting_attn_split.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "ops/common.h"
#include "ops/forgetting_attn_call.h"
#include "ops/head_runs.h"
#include "ops/held_shard.h"
#include "ops/key_exchange.h"

namespace fox::ops {
namespace {

using dist::SequenceShard;

constexpr const char* kForgettingAttnSplitOp = "forgetting_attn_split";

/// The gates of the whole sequence (nothing without gates), those that are none set to 0, and NaN if there were such.
struct WholeGates {
  OptionalTensor log_f_BTH;
  at::Tensor poison;  ///< scalar: 0 or NaN; undefined without gates
};

WholeGates gather_gates(const OptionalTensor& log_f, const SequenceShard& shard) {
  if (!log_f) return {};
  const auto all = shard.gather(*log_f);
  const auto bad = all.le(0).logical_not();  // NaN too
  const auto zero = at::zeros({}, all.options());
  return {all.masked_fill(bad, 0), zero.masked_fill(bad.any(), std::numeric_limits<double>::quiet_NaN())};
}

/// max |q·k * scale| per query head over the whole sequence, by Cauchy and Schwarz.
at::Tensor split_logit_bound(const at::Tensor& q, const at::Tensor& k, double scale, const SequenceShard& shard) {
  const auto largest_norm = [](const at::Tensor& t) {
    return at::linalg_vector_norm(t, 2, at::IntArrayRef({3}), false, compute_type(t.scalar_type()))
        .amax(at::IntArrayRef({0, 1}));
  };
  const auto mine = at::cat({largest_norm(q), largest_norm(k)});
  const auto all = at::empty({shard.ranks() * mine.size(0)}, mine.options());
  shard.group().all_gather(all, mine).wait();
  const auto norms = all.view({shard.ranks(), -1}).amax(0).split_with_sizes({q.size(2), k.size(2)});
  return norms[0] * norms[1].repeat_interleave(q.size(2) / k.size(2)) * std::abs(scale);
}

/// All that forward and backward work out alike.
struct SplitCall {
  const SequenceShard& shard;
  ForgettingAttnOptions options;
  WholeGates gates;
  KeyPlan plan;
  int64_t group;  ///< query heads a key head

  SplitCall(const ForgettingAttnInputs& in, const ForgettingAttnOptions& given, const SequenceShard& ranks)
      : shard(ranks), options(given), gates(gather_gates(in.log_f, ranks)), group(in.q.size(2) / in.k.size(2)) {
    if (!gates.log_f_BTH) options.log_pruning_tolerance.reset();
    if (options.log_pruning_tolerance && !options.logit_bound) {
      const double scale = options.scale.value_or(std::pow(static_cast<double>(in.q.size(3)), -0.5));
      options.logit_bound = split_logit_bound(in.q, in.k, scale, shard);
    }
    plan = plan_keys(gates.log_f_BTH, options, shard, in.q.size(1), in.k.size(2));
  }

  HeadRuns query_heads(const KeySlice& slice) const { return HeadRuns(slice.kv_heads, group); }
  /// What the queries of the chunk in `slot` see.
  KeyRange seen(const KeySlice& slice, int64_t slot) const {
    const int64_t chunk = shard.chunk(shard.rank(), slot);
    return {slice.first[chunk], (chunk + 1) * plan.chunk_len};
  }
  OptionalTensor gates_of(const KeyRange& range, const HeadRuns& heads) const {
    if (!gates.log_f_BTH) return std::nullopt;
    return heads.of(gates.log_f_BTH->narrow(1, range.begin, range.size()), 2);
  }
  ForgettingAttnOptions options_of(const HeadRuns& heads) const {
    auto own = options;
    if (own.logit_bound) own.logit_bound = heads.of(*own.logit_bound, 0);
    if (own.log_pruning_tolerance) *own.log_pruning_tolerance += std::log1p(-kShareNotSent);
    return own;
  }
};

/// Calls f(number, slice, keys) for every slice, the next one's keys already on their way.
template <class F>
void for_each_slice(const SplitCall& split, const at::Tensor& k, const at::Tensor& v, const F& f) {
  const auto begin = [&](size_t n) { return KeyExchange(split.plan, n, split.shard, k, v); };
  auto exchange = begin(0);
  for (size_t n = 0; n < split.plan.slices.size(); ++n) {
    const SliceKeys keys = exchange.keys();
    if (n + 1 < split.plan.slices.size()) exchange = begin(n + 1);
    f(n, split.plan.slices[n], keys);
  }
}

std::pair<at::Tensor, at::Tensor> split_forward(const SplitCall& split, const at::Tensor& q, const at::Tensor& k,
                                                const at::Tensor& v) {
  const auto o = at::empty(q.sizes(), q.options());
  at::Tensor lse;
  for_each_slice(split, k, v, [&](size_t, const KeySlice& slice, const SliceKeys& keys) {
    const auto heads = split.query_heads(slice);
    for (int64_t slot = 0; slot < SequenceShard::kChunks; ++slot) {
      const auto range = split.seen(slice, slot);
      const auto kv = keys.view(range);
      const auto [o_slice, lse_slice] =
          call_forgetting_attn({heads.of(SequenceShard::rows(q, slot), 2), kv[0], kv[1], split.gates_of(range, heads)},
                               split.options_of(heads));
      if (!lse.defined()) lse = at::empty({q.size(0), q.size(2), q.size(1)}, lse_slice.options());
      heads.put(SequenceShard::rows(o, slot), 2, o_slice);
      heads.put(SequenceShard::rows(lse, slot), 1, lse_slice);
    }
  });
  if (split.gates.poison.defined()) o.add_(split.gates.poison);
  return {o, lse};
}

ForgettingAttnGradients split_backward(const SplitCall& split, const at::Tensor& grad_o, const ForgettingAttnInputs& in,
                                       const at::Tensor& o, const at::Tensor& lse) {
  const auto rows = SequenceShard::rows;
  const auto type = in.k.scalar_type(), sum_type = compute_type(type);
  const auto like = [](const at::Tensor& t) { return at::empty(t.sizes(), t.options()); };
  const auto dq = like(in.q), dk = like(in.k), dv = like(in.v);
  at::Tensor d_log_f;  // of all gates, as far as this rank's queries go
  if (in.log_f) d_log_f = at::zeros_like(*split.gates.log_f_BTH);
  for_each_slice(split, in.k, in.v, [&](size_t number, const KeySlice& slice, const SliceKeys& keys) {
    const auto heads = split.query_heads(slice);
    const HeadRuns kv_heads(slice.kv_heads);
    const SliceKeys grads{keys.begin, at::zeros_like(keys.kv_TB2HD, keys.kv_TB2HD.options().dtype(sum_type))};
    for (int64_t slot = 0; slot < SequenceShard::kChunks; ++slot) {
      const auto range = split.seen(slice, slot);
      const auto kv = keys.view(range), grad_kv = grads.view(range);
      const auto [dq_slice, dk_slice, dv_slice, d_log_f_slice] = call_forgetting_attn_backward(
          heads.of(rows(grad_o, slot), 2), {heads.of(rows(in.q, slot), 2), kv[0], kv[1], split.gates_of(range, heads)},
          heads.of(rows(o, slot), 2), heads.of(rows(lse, slot), 1), split.options_of(heads));
      heads.put(rows(dq, slot), 2, dq_slice);
      grad_kv[0].add_(dk_slice);
      grad_kv[1].add_(dv_slice);
      if (in.log_f) heads.add(d_log_f.narrow(1, range.begin, range.size()), 2, d_log_f_slice);
    }
    const auto own = return_gradients(grads, split.plan, number, split.shard, type).to(type);
    kv_heads.put(dk, 2, own[0]);
    kv_heads.put(dv, 2, own[1]);
  });
  if (!in.log_f) return {dq, dk, dv, d_log_f};
  split.shard.group().all_reduce(d_log_f).wait();
  return {dq, dk, dv, split.shard.take(d_log_f)};
}

class ForgettingAttnSplit : public torch::autograd::Function<ForgettingAttnSplit> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const OptionalTensor& log_f, const ForgettingAttnOptions& options,
                            const std::shared_ptr<const SequenceShard>& shard) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [o, lse] = split_forward(SplitCall({q, k, v, log_f}, options, *shard), q, k, v);
    ctx->save_for_backward({q, k, v, value_or_undefined(log_f), o, lse, value_or_undefined(options.logit_bound)});
    keep_numbers(ctx, options);
    hold_shard(ctx, shard);
    return o;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto options = kept_numbers(ctx);
    options.logit_bound = optional_of(saved[6]);
    const ForgettingAttnInputs in{saved[0], saved[1], saved[2], optional_of(saved[3])};
    const auto shard = held_shard(ctx);
    // Gates and plan are made again: kept, they would be as long as the sequence in every layer.
    const auto [dq, dk, dv, d_log_f] = split_backward(SplitCall(in, options, *shard), grads[0], in, saved[4], saved[5]);
    return {dq, dk, dv, d_log_f, at::Tensor(), at::Tensor()};
  }
};

void check_forgetting_attn_split(const ForgettingAttnInputs& in, const ForgettingAttnOptions& options) {
  check_forgetting_attn(in, options);
  if (options.seq_start || options.cu_seqlens || in.q.size(1) != in.k.size(1)) {
    throw Error(fmt::format("{}: padding, packed documents or a past", kForgettingAttnSplitOp),
                "a sequence that is split over ranks is one whole document");
  }
  if (in.q.size(0) % SequenceShard::kChunks != 0) {
    throw Error(fmt::format("{}: {} rows", kForgettingAttnSplitOp, in.q.size(0)),
                "they are the two chunks of each sequence");
  }
}

}  // namespace

at::Tensor forgetting_attn_split(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const std::optional<at::Tensor>& log_f, const ForgettingAttnOptions& options,
                                 const std::shared_ptr<const dist::SequenceShard>& shard) {
  check_forgetting_attn_device(q);
  check_forgetting_attn_split({q, k, v, log_f}, options);
  const auto type = q.scalar_type(), wide = compute_type(type);
  if (!q.is_cpu() || type == wide) return ForgettingAttnSplit::apply(q, k, v, log_f, options, shard);
  // The CPU computes in float32: cast outside, so that backward sees the output before it is rounded.
  return ForgettingAttnSplit::apply(q.to(wide), k.to(wide), v.to(wide), log_f, options, shard).to(type);
}

}  // namespace fox::ops
