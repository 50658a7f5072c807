#pragma once

#include <array>
#include <cstdint>

namespace fox::data {

/// Well-mixed bits of x (the finalizer of splitmix64: Steele, Lea and Flood 2014). The same on every machine.
uint64_t mix_bits(uint64_t x);
/// Mixed bits of several numbers in order.
template <typename... Numbers>
uint64_t hash_numbers(Numbers... numbers) {
  uint64_t state = 0;
  ((state = mix_bits(state + 0x9E3779B97F4A7C15u + static_cast<uint64_t>(numbers))), ...);
  return state;
}

/// A pseudo-random order of 0 … size - 1 that is computed, not stored: a Feistel network permutes the numbers below the
/// next power of four, and those that fall outside are permuted again until they are inside (Black and Rogaway 2002).
class Permutation {
 public:
  Permutation(uint64_t size, uint64_t key);
  uint64_t operator()(uint64_t index) const;

 private:
  static constexpr int kRounds = 6;
  uint64_t size_;
  int half_bits_;
  std::array<uint64_t, kRounds> keys_;
};

}  // namespace fox::data
