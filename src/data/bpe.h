#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <queue>
#include <string_view>
#include <vector>

#include "data/word_cache.h"

namespace fox::data {

/// The ids `left` and `right`, side by side, become `merged`.
struct Merge {
  int32_t left, right, merged;
};

/// Byte-pair encoding of one word: of all neighbours that may merge, those of the best merge do, the leftmost first,
/// until none may (Sennrich, Haddow and Birch 2016, over bytes). O(n log n) in the length of the word.
class BytePairEncoder {
 public:
  /// `byte_ids`: the id of each byte. `merges`: best first; of two merges of the same pair the later counts.
  BytePairEncoder(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges);

  /// Memory of one thread at work, with the words it met before.
  struct Scratch {
    WordCache known;

    // The word at work as a list: part i is ids[i] and begins at byte i; `rank[i]` is that of the merge with its
    // successor.
    std::vector<int32_t> ids;
    std::vector<uint32_t> next, previous, rank;
    std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue;  // rank << 32 | position
  };

  /// Appends the ids of `word` to `out`.
  void encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;

 private:
  struct Slot {
    uint64_t pair;
    uint32_t rank;
    int32_t merged;
  };
  const Slot* find(int32_t left, int32_t right) const;
  void merge(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const;
  void update_rank(uint32_t position, Scratch& scratch) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<Slot> slots_;  // open addressing, a power of two
  int shift_;                // 64 - log2(slots)
};

}  // namespace fox::data
