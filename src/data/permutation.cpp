#include "data/permutation.h"

#include <bit>

namespace fox::data {

uint64_t mix_bits(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

Permutation::Permutation(uint64_t size, uint64_t key) : size_(size) {
  half_bits_ = (std::bit_width(size > 1 ? size - 1 : 1) + 1) / 2;
  for (int round = 0; round < kRounds; ++round) keys_[round] = hash_numbers(key, round);
}

uint64_t Permutation::operator()(uint64_t index) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  // At most four times as many numbers as wanted, so a walk is short: under four steps on average.
  do {
    uint64_t left = index >> half_bits_, right = index & mask;
    for (const uint64_t key : keys_) {
      const uint64_t mixed = left ^ (mix_bits(right + key) & mask);
      left = right;
      right = mixed;
    }
    index = left << half_bits_ | right;
  } while (index >= size_);
  return index;
}

}  // namespace fox::data
