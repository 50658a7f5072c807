#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "dist/sequence_shard.h"
#include "ops/forgetting_attn.h"

/// Which keys each rank of a split sequence needs (ops/forgetting_attn_split.h). Every rank works out the same plan, so
/// nobody has to ask for what it needs.
namespace fox::ops {

/// Of ε, what pruning may leave out of a row, the share that is for keys which are not sent; the rest is for those that
/// the operator leaves out of what it gets.
constexpr double kShareNotSent = 1.0 / 16;

/// Positions [begin, end) of the sequence.
struct KeyRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};

/// Some key heads, whose keys and values travel together.
struct KeySlice {
  std::vector<int64_t> kv_heads;  ///< ascending
  std::vector<int64_t> first;     ///< of each chunk of queries: the first key that one of its queries may weigh
};

struct KeyPlan {
  int64_t chunk_len = 0;
  /// As many as there are ranks, or one a key head: a slice of the whole sequence then takes no more memory than all
  /// heads of one rank's part. Heads of like reach are together.
  std::vector<KeySlice> slices;

  /// The keys of `chunk` that `rank` needs for its later chunks: its last ones, or none. Not asked for a rank's own.
  KeyRange needed(const KeySlice& slice, const dist::SequenceShard& shard, int64_t rank, int64_t chunk) const;
};

/// log_f_BTH: all gates of the sequence, nothing of which is above 0 or NaN, or nothing. options.logit_bound must be
/// set where options.log_pruning_tolerance is. Waits for the device when it prunes.
KeyPlan plan_keys(const std::optional<at::Tensor>& log_f_BTH, const ForgettingAttnOptions& options,
                  const dist::SequenceShard& shard, int64_t chunk_len, int64_t kv_heads);

}  // namespace fox::ops
