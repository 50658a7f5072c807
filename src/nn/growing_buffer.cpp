#include "nn/growing_buffer.h"

#include <ATen/Functions.h>

#include <algorithm>

namespace fox::nn {

at::Tensor GrowingBuffer::append(const at::Tensor& x_BT) {
  const int64_t added = x_BT.size(1);
  if (!storage_.defined() || end_ + added > storage_.size(1)) {
    // Twice what is needed: the next move comes after at least as many rows as this one copies.
    auto shape = x_BT.sizes().vec();
    shape[1] = std::max<int64_t>(64, 2 * (length() + added));
    auto larger = at::empty(shape, x_BT.options());
    if (storage_.defined()) larger.narrow(1, 0, length()).copy_(storage_.narrow(1, begin_, length()));
    storage_ = std::move(larger);
    end_ -= begin_;
    begin_ = 0;
  }
  storage_.narrow(1, end_, added).copy_(x_BT);
  end_ += added;
  return storage_.narrow(1, begin_, length());
}

void GrowingBuffer::keep_last(int64_t keep) { begin_ = std::max(begin_, end_ - keep); }

}  // namespace fox::nn
