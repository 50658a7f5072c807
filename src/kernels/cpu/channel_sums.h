#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cpu/parallel.h"

// What passes over rows share that add something up for each channel. A task has some channels of all rows, so that the
// sums come in one order, the same bits on any number of threads.
namespace fox::kernels {

/// Calls work(begin, end) for blocks of channels.
template <class Work>
void parallel_channels(int64_t rows, int64_t channels, const Work& work) {
  constexpr int64_t kBlock = 64;
  const int64_t blocks = (channels + kBlock - 1) / kBlock;
  parallel_pieces(blocks, pass_grain(kBlock * rows), [&](int64_t first, int64_t last, int64_t) {
    for (int64_t begin = first * kBlock; begin < std::min(last * kBlock, channels); begin += kBlock) {
      work(begin, std::min(begin + kBlock, channels));
    }
  });
}

/// Calls add(first, last, sums) for some rows [first, last) at a time, whose sums are added up before they join those
/// of the others in `total`: fewer roundings.
template <class T, class Add>
void add_up_rows(int64_t rows, std::vector<T>& total, const Add& add) {
  constexpr int64_t kRows = 128;
  std::vector<T> sums(total.size());
  for (int64_t first = 0; first < rows; first += kRows) {
    std::fill(sums.begin(), sums.end(), T(0));
    add(first, std::min(first + kRows, rows), sums.data());
    for (size_t i = 0; i < total.size(); ++i) total[i] += sums[i];
  }
}

}  // namespace fox::kernels
