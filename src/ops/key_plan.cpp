#include "ops/key_plan.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fox::ops {
namespace {

// The operator's blocks of keys, so that a range's blocks are some of the whole sequence's.
constexpr int64_t kKeyBlock = 64;
// Below this a gate resets: what is before it weighs nothing. Keeps infinities out of the sums.
constexpr double kResetGate = -1e6;

// First key of each chunk of queries (chunks, Hk) that pruning leaves, by the operator's own bound: all keys up to the
// end of a block hold of the chunk's first query at most exp(2U) Σ exp(-c) over them / Σ exp(-c) over what it sees.
at::Tensor first_unpruned(const at::Tensor& log_f_BTH, const ForgettingAttnOptions& options, int64_t chunks,
                          int64_t kv_heads) {
  const int64_t length = log_f_BTH.size(1), heads = log_f_BTH.size(2), chunk_len = length / chunks;
  const auto index = log_f_BTH.options().dtype(at::kLong);
  // Time last: along any other dimension a GPU adds up one number after another.
  const auto rise_BHT = -log_f_BTH.transpose(1, 2).to(at::kDouble).clamp_min(kResetGate).contiguous().cumsum(2);
  const auto mass_BHT = rise_BHT.logcumsumexp(2);
  const auto begin_C = at::arange(chunks, index) * chunk_len;
  const auto last_N = at::arange(kKeyBlock - 1, length, kKeyBlock, index);
  const auto bound_H = options.logit_bound->to(at::kDouble) * (1 + 1e-4);
  const auto share_H = -2 * bound_H + (*options.log_pruning_tolerance + std::log(kShareNotSent));
  const auto before_CN = last_N < begin_C.unsqueeze(1);
  const auto key_BHN = mass_BHT.index_select(2, last_N);
  // In a window a query has its own key for sure.
  const auto row_BHC = (options.window ? rise_BHT : mass_BHT).index_select(2, begin_C);
  std::vector<at::Tensor> blocks;
  for (int64_t c = 0; c < chunks; ++c) {  // one at a time: (chunks, B, H, N) would be large
    const auto pruned_BHN = (key_BHN - row_BHC.narrow(2, c, 1) < share_H.unsqueeze(1)) & before_CN[c];
    blocks.push_back(pruned_BHN.sum(2).amin(0));
  }
  return kKeyBlock * at::stack(blocks).view({chunks, kv_heads, heads / kv_heads}).amin(-1);
}

at::Tensor first_keys(const std::optional<at::Tensor>& log_f_BTH, const ForgettingAttnOptions& options, int64_t chunks,
                      int64_t chunk_len, int64_t kv_heads) {
  auto first_CH = at::zeros({chunks, kv_heads}, at::kLong);
  if (options.window) {
    const auto oldest_C = at::arange(chunks, at::kLong) * chunk_len - (*options.window - 1);
    first_CH = (oldest_C.clamp_min(0).div(kKeyBlock, "floor") * kKeyBlock).unsqueeze(1).expand_as(first_CH);
  }
  if (!log_f_BTH || !options.log_pruning_tolerance) return first_CH;
  return at::maximum(first_CH, first_unpruned(*log_f_BTH, options, chunks, kv_heads).cpu());
}

}  // namespace

KeyRange KeyPlan::needed(const KeySlice& slice, const dist::SequenceShard& shard, int64_t rank, int64_t chunk) const {
  const int64_t end = (chunk + 1) * chunk_len;
  int64_t begin = end;
  for (int64_t slot = 0; slot < dist::SequenceShard::kChunks; ++slot) {
    const int64_t queries = shard.chunk(rank, slot);
    if (queries > chunk) begin = std::min(begin, slice.first[queries]);
  }
  return {std::max(begin, chunk * chunk_len), end};
}

KeyPlan plan_keys(const std::optional<at::Tensor>& log_f_BTH, const ForgettingAttnOptions& options,
                  const dist::SequenceShard& shard, int64_t chunk_len, int64_t kv_heads) {
  const int64_t chunks = shard.chunks();
  const auto first_CH = first_keys(log_f_BTH, options, chunks, chunk_len, kv_heads).contiguous();
  const auto first = first_CH.accessor<int64_t, 2>();
  std::vector<int64_t> reach(kv_heads), order(kv_heads);
  for (int64_t h = 0; h < kv_heads; ++h) {
    for (int64_t c = 0; c < chunks; ++c) reach[h] -= first[c][h];
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return reach[a] > reach[b]; });

  KeyPlan plan{chunk_len, {}};
  const int64_t slices = std::min(shard.ranks(), kv_heads);
  for (int64_t s = 0; s < slices; ++s) {
    KeySlice slice;
    slice.kv_heads.assign(order.begin() + s * kv_heads / slices, order.begin() + (s + 1) * kv_heads / slices);
    std::sort(slice.kv_heads.begin(), slice.kv_heads.end());  // neighbours are taken together (HeadRuns)
    for (int64_t c = 0; c < chunks; ++c) {
      int64_t lowest = c * chunk_len;
      for (const int64_t h : slice.kv_heads) lowest = std::min(lowest, first[c][h]);
      slice.first.push_back(lowest);
    }
    plan.slices.push_back(std::move(slice));
  }
  return plan;
}

}  // namespace fox::ops
