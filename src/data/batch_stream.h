#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "data/token_store.h"

namespace fox::data {

struct Batch {
  at::Tensor ids_BT;     ///< int64 inputs: labels shifted right, end_of_text first
  at::Tensor labels_BT;  ///< int64; -100 = ignored
};

/// The endless, deterministic order of training contexts: epoch e visits the store's contexts of T tokens in a
/// permutation drawn from (seed, e), shifted by an offset in [0, T) drawn from the same. Stateless: context `index` is a
/// pure function of (store, T, seed, index), so a run can be entered at any token.
class BatchStream {
 public:
  /// Throws when the store holds fewer than `context` tokens, saying how many are short.
  BatchStream(std::shared_ptr<const TokenStore> store, int64_t context, uint64_t seed, int32_t start_id);
  /// Contexts first_context … first_context + count - 1 as one batch of `count` rows.
  Batch get(int64_t first_context, int64_t count) const;
  int64_t contexts_per_epoch() const;

 private:
  std::shared_ptr<const TokenStore> store_;
  int64_t context_;
  uint64_t seed_;
  int32_t start_id_;
};

}  // namespace fox::data
