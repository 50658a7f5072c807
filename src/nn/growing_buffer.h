#pragma once

#include <ATen/core/Tensor.h>

namespace fox::nn {

/// Rows in time (B, T, ...) that grow at the end and may be dropped at the front: the keys a cache slot holds.
/// Appending costs amortised constant time a token; what is returned are views that the next append may leave stale.
class GrowingBuffer {
 public:
  /// Adds x_BT (B, T, ...) and returns all rows held.
  at::Tensor append(const at::Tensor& x_BT);
  /// Forgets the oldest rows, if more than `keep` are held.
  void keep_last(int64_t keep);
  int64_t length() const { return end_ - begin_; }

 private:
  at::Tensor storage_;  // (B, capacity, ...)
  int64_t begin_ = 0, end_ = 0;
};

}  // namespace fox::nn
