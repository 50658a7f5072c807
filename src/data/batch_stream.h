#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "data/token_store.h"
#include "data/training_stream.h"

namespace fox::data {

/// The endless, deterministic order of training contexts. The store's N tokens are a ring, which epoch e enters at a
/// place drawn from (seed, e) and cuts into N / T contexts of T tokens, visited in a permutation drawn from the same:
/// each context comes once an epoch, fewer than T tokens are left out, and other ones each time. Every context begins
/// with the input `start_id`, so that all its T tokens are labels. Stateless: context `index` is a pure function of
/// (store, T, seed, index), the same on every machine, so a run can be entered at any token. Thread-safe.
class BatchStream : public TrainingStream {
 public:
  /// Throws when the store holds fewer than `context` tokens, saying how many are short.
  BatchStream(std::shared_ptr<const TokenStore> store, int64_t context, uint64_t seed, int32_t start_id);
  Batch get(int64_t first_context, int64_t count) const override;
  int64_t contexts_per_epoch() const override;

 private:
  /// The tokens of context `index`.
  void read(int64_t index, std::span<int64_t> out) const;

  std::shared_ptr<const TokenStore> store_;
  int64_t context_;
  uint64_t seed_;
  int32_t start_id_;
};

}  // namespace fox::data
