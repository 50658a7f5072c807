#include "data/bpe.h"

#include <fmt/format.h>

#include <bit>
#include <limits>

#include "base/error.h"

namespace fox::data {

namespace {

constexpr uint64_t kNoPair = std::numeric_limits<uint64_t>::max();
constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
uint64_t pair_of(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

/// 2^64 / golden ratio: Fibonacci hashing spreads neighbouring ids over the table.
size_t slot_of(uint64_t pair, int shift) { return (pair ^ pair >> 29) * 0x9E3779B97F4A7C15u >> shift; }

}  // namespace

BytePairEncoder::BytePairEncoder(const std::array<int32_t, 256>& byte_ids, const std::vector<Merge>& merges)
    : byte_ids_(byte_ids) {
  const size_t size = std::bit_ceil(std::max<size_t>(merges.size() * 3, 16));
  shift_ = 64 - std::countr_zero(size);
  slots_.assign(size, Slot{kNoPair, kNone, -1});
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t pair = pair_of(merges[rank].left, merges[rank].right);
    size_t i = slot_of(pair, shift_);
    while (slots_[i].pair != kNoPair && slots_[i].pair != pair) i = (i + 1) & (size - 1);
    slots_[i] = {pair, static_cast<uint32_t>(rank), merges[rank].merged};
  }
}

const BytePairEncoder::Slot* BytePairEncoder::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  for (size_t i = slot_of(pair, shift_);; i = (i + 1) & (slots_.size() - 1)) {
    if (slots_[i].pair == pair) return &slots_[i];
    if (slots_[i].pair == kNoPair) return nullptr;
  }
}

void BytePairEncoder::encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& out) const {
  if (word.size() == 1) {
    out.push_back(byte_ids_[static_cast<uint8_t>(word[0])]);
    return;
  }
  scratch.known.append(word, out,
                       [&](std::string_view unknown, std::vector<int32_t>& ids) { merge(unknown, scratch, ids); });
}

void BytePairEncoder::update_rank(uint32_t position, Scratch& s) const {
  const uint32_t successor = s.next[position];
  const Slot* slot = successor == kNone ? nullptr : find(s.ids[position], s.ids[successor]);
  s.rank[position] = slot ? slot->rank : kNone;
  if (slot) s.queue.push(static_cast<uint64_t>(slot->rank) << 32 | position);
}

void BytePairEncoder::merge(std::string_view word, Scratch& s, std::vector<int32_t>& out) const {
  if (word.size() >= kNone)
    throw Error(fmt::format("a word of {} bytes is too long to encode", word.size()), "is this text?");
  const auto size = static_cast<uint32_t>(word.size());
  s.ids.resize(size);
  s.next.resize(size);
  s.previous.resize(size);
  s.rank.resize(size);
  for (uint32_t i = 0; i < size; ++i) {
    s.ids[i] = byte_ids_[static_cast<uint8_t>(word[i])];
    s.next[i] = i + 1 < size ? i + 1 : kNone;
    s.previous[i] = i > 0 ? i - 1 : kNone;
  }
  for (uint32_t i = 0; i < size; ++i) update_rank(i, s);
  while (!s.queue.empty()) {
    const auto rank = static_cast<uint32_t>(s.queue.top() >> 32);
    const auto position = static_cast<uint32_t>(s.queue.top());
    s.queue.pop();
    // Entries are not taken out when a neighbour's merge outdates them: they no longer agree with the list.
    if (s.rank[position] != rank) continue;
    const uint32_t gone = s.next[position];
    s.ids[position] = find(s.ids[position], s.ids[gone])->merged;
    s.rank[gone] = kNone;
    s.next[position] = s.next[gone];
    if (s.next[position] != kNone) s.previous[s.next[position]] = position;
    update_rank(position, s);
    if (s.previous[position] != kNone) update_rank(s.previous[position], s);
  }
  for (uint32_t i = 0; i != kNone; i = s.next[i]) out.push_back(s.ids[i]);
}

}  // namespace fox::data
