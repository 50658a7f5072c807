#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fox::data {

struct Batch {
  at::Tensor ids_BT;     ///< int64 inputs: labels shifted right, end_of_text first
  at::Tensor labels_BT;  ///< int64; -100 = ignored
};

/// What a model trains on: contexts of one length in a fixed order. Context `index` is a pure function of the data and
/// of what the stream was made with, so a run can be entered at any token. Thread-safe.
class TrainingStream {
 public:
  virtual ~TrainingStream() = default;
  /// Contexts first_context … first_context + count - 1 as one batch of `count` rows.
  virtual Batch get(int64_t first_context, int64_t count) const = 0;
  virtual int64_t contexts_per_epoch() const = 0;
};

}  // namespace fox::data
