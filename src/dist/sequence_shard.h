#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <utility>

#include "dist/process_group.h"

namespace fox::dist {

/// A sequence that the P ranks of a group hold together: it is cut into 2P chunks of equal length, and rank r has the
/// chunks r and 2P - 1 - r ("zig-zag"). Causal attention of the n-th chunk costs n + 1/2 pairs of chunks, so every rank
/// has the same work; with P longer pieces instead the last rank would do 2 - 1/P times the mean, and all would wait.
///
/// On a rank the chunks are rows of a batch: what was (B, T, ...) is (2B, T / 2P, ...), the earlier chunk's rows first.
/// Whatever looks at one token at a time need not know.
class SequenceShard {
 public:
  static constexpr int64_t kChunks = 2;  ///< a rank

  explicit SequenceShard(ProcessGroup group) : group_(std::move(group)) {}

  const ProcessGroup& group() const { return group_; }
  int64_t ranks() const { return group_.size(); }
  int64_t rank() const { return group_.rank(); }

  /// Chunks of the whole sequence, which chunk is number `slot` (0 or 1) of a rank, and whose a chunk is.
  int64_t chunks() const { return kChunks * ranks(); }
  int64_t chunk(int64_t rank, int64_t slot) const { return slot == 0 ? rank : chunks() - 1 - rank; }
  int64_t owner(int64_t chunk) const { return chunk < ranks() ? chunk : chunks() - 1 - chunk; }
  int64_t slot(int64_t chunk) const { return chunk < ranks() ? 0 : 1; }

  /// This rank's chunks of x (B, T, ...), (2B, T / 2P, ...) contiguous. Throws fox::Error when T is no multiple of 2P.
  at::Tensor take(const at::Tensor& x_BT) const;
  /// The rows of x (2B, ...) that belong to the chunk in `slot`, (B, ...).
  static at::Tensor rows(const at::Tensor& x, int64_t slot) { return x.chunk(kChunks)[slot]; }
  /// The whole (B, T, ...) on every rank, of everybody's take() of it.
  at::Tensor gather(const at::Tensor& part) const;
  /// Hands each chunk's part of x (2B, ...) to the chunk after it (by = 1) or before it (by = -1), whoever has that
  /// one, and returns what came: 0 where there is no such chunk.
  at::Tensor hand_on(const at::Tensor& x, int64_t by) const;

  /// What attention has sent of keys, values and their gradients on this rank so far.
  struct Traffic {
    std::atomic<int64_t> bytes = 0, messages = 0;
  };
  Traffic& traffic() const { return traffic_; }

 private:
  ProcessGroup group_;
  mutable Traffic traffic_;
};

}  // namespace fox::dist
