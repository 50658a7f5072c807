#include "ops/key_exchange.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "ops/head_runs.h"

namespace fox::ops {
namespace {

using dist::SequenceShard;

KeyRange range_of(const KeyPlan& plan, int64_t chunk) { return {chunk * plan.chunk_len, (chunk + 1) * plan.chunk_len}; }

/// Memory for the keys that this rank needs of a slice.
SliceKeys make_room(const KeyPlan& plan, const KeySlice& slice, const SequenceShard& shard, int64_t batch, int64_t dim,
                    const at::TensorOptions& options) {
  const int64_t early = shard.chunk(shard.rank(), 0), late = shard.chunk(shard.rank(), 1);
  const int64_t begin = std::min(slice.first[early], slice.first[late]), end = range_of(plan, late).end;
  return {begin, at::empty({end - begin, batch, 2, std::ssize(slice.kv_heads), dim}, options)};
}

/// The ranges that rank `owner` has and rank `user` needs.
std::vector<KeyRange> ranges_between(const KeyPlan& plan, const KeySlice& slice, const SequenceShard& shard,
                                     int64_t owner, int64_t user) {
  std::vector<KeyRange> ranges;
  for (int64_t slot = 0; slot < SequenceShard::kChunks; ++slot) {
    const auto range = plan.needed(slice, shard, user, shard.chunk(owner, slot));
    if (range.size() > 0) ranges.push_back(range);
  }
  return ranges;
}

std::pair<int64_t, int64_t> neighbours(const SequenceShard& shard, int64_t round) {
  const int64_t ranks = shard.ranks(), rank = shard.rank();
  return {(rank + round) % ranks, (rank - round + ranks) % ranks};
}

dist::Transfer exchange(const SequenceShard& shard, const std::vector<at::Tensor>& send, int64_t to,
                        const std::vector<at::Tensor>& receive, int64_t from) {
  for (const auto& tensor : send) {
    shard.traffic().bytes += static_cast<int64_t>(tensor.nbytes());
    shard.traffic().messages += 1;
  }
  return shard.group().exchange(send, static_cast<int>(to), receive, static_cast<int>(from));
}

}  // namespace

KeyExchange::KeyExchange(const KeyPlan& plan, size_t number, const SequenceShard& shard, const at::Tensor& k,
                         const at::Tensor& v) {
  const KeySlice& slice = plan.slices[number];
  const HeadRuns heads(slice.kv_heads);
  keys_ = make_room(plan, slice, shard, k.size(0) / SequenceShard::kChunks, k.size(3), k.options());
  for (int64_t slot = 0; slot < SequenceShard::kChunks; ++slot) {
    const auto room = keys_.view(range_of(plan, shard.chunk(shard.rank(), slot)));
    room[0].copy_(heads.of(SequenceShard::rows(k, slot), 2));
    room[1].copy_(heads.of(SequenceShard::rows(v, slot), 2));
  }
  for (int64_t round = 1; round < shard.ranks(); ++round) {
    const auto [to, from] = neighbours(shard, round);
    std::vector<at::Tensor> send, receive;
    for (const auto& range : ranges_between(plan, slice, shard, shard.rank(), to)) send.push_back(keys_.piece(range));
    for (const auto& range : ranges_between(plan, slice, shard, from, shard.rank())) {
      receive.push_back(keys_.piece(range));
    }
    transfers_.push_back(exchange(shard, send, to, receive, from));
  }
}

const SliceKeys& KeyExchange::keys() {
  for (auto& transfer : std::exchange(transfers_, {})) transfer.wait();
  return keys_;
}

at::Tensor return_gradients(const SliceKeys& grads, const KeyPlan& plan, size_t number, const SequenceShard& shard,
                            at::ScalarType type) {
  const KeySlice& slice = plan.slices[number];
  struct Incoming {
    KeyRange range;
    at::Tensor grad;
  };
  std::vector<Incoming> incoming;
  std::vector<dist::Transfer> transfers;
  for (int64_t round = 1; round < shard.ranks(); ++round) {
    const auto [to, from] = neighbours(shard, round);
    std::vector<at::Tensor> send, receive;
    for (const auto& range : ranges_between(plan, slice, shard, to, shard.rank())) {
      send.push_back(grads.piece(range).to(type));
    }
    for (const auto& range : ranges_between(plan, slice, shard, shard.rank(), from)) {
      receive.push_back(at::empty_like(grads.piece(range), grads.kv_TB2HD.options().dtype(type)));
      incoming.push_back({range, receive.back()});
    }
    transfers.push_back(exchange(shard, send, to, receive, from));
  }
  for (auto& transfer : transfers) transfer.wait();
  // In the order of the rounds, so that sums are the same each time.
  for (const auto& [range, grad] : incoming) grads.piece(range).add_(grad);
  std::vector<at::Tensor> own;
  for (int64_t slot = 0; slot < SequenceShard::kChunks; ++slot) {
    own.push_back(grads.view(range_of(plan, shard.chunk(shard.rank(), slot))));
  }
  return at::cat(own, 1);
}

}  // namespace fox::ops
