#pragma once

#include <cstdint>

namespace fox::cuda {

/// (B, T, H, D) with D contiguous and strides in elements.
template <class T>
struct HeadTensor {
  const T* data;
  int64_t batch, time, head;
};

}  // namespace fox::cuda
