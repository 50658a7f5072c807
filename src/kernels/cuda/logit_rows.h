#pragma once

#include <cstdint>

namespace fox::cuda {

/// Logits, and one more number for each channel. T: __nv_bfloat16, __half, float, double; A: what T is computed in.
template <class T, class A>
struct LogitRows {
  const T* logits;  ///< rows × channels, rows `stride` elements apart
  int64_t stride;
  const A* per_channel;  ///< channels, contiguous from a 16-byte boundary on; or nullptr
  int64_t rows, channels;
};

/// Rows of logits for a row of partial sums, `channels` of them, of the gradient of per_channel: sum_rows makes it of
/// these.
constexpr int kLogitRowsASum = 64;
inline int64_t logit_row_partials(int64_t rows) { return (rows + kLogitRowsASum - 1) / kLogitRowsASum; }

}  // namespace fox::cuda
