#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace fox::kernels {

/// How many pieces parallel_pieces makes of n items when a piece should hold at least `grain` of them.
inline int64_t num_pieces(int64_t n, int64_t grain) {
  if (omp_in_parallel()) return 1;
  return std::clamp<int64_t>(n / std::max<int64_t>(grain, 1), 1, omp_get_max_threads());
}

/// The grain of a pass over memory with so many elements an item: below about 16k elements a thread the fork costs more
/// than it saves.
inline int64_t pass_grain(int64_t elements) { return 16384 / (elements + 1) + 1; }

/// Runs body(begin, end, piece) on equal contiguous pieces of [0, n), one a thread. The cut depends on n, grain and the
/// number of threads alone, so that sums by piece come out the same bits in every run.
template <class Body>
void parallel_pieces(int64_t n, int64_t grain, const Body& body) {
  const int64_t pieces = num_pieces(n, grain);
  if (pieces == 1) {
    if (n > 0) body(int64_t{0}, n, int64_t{0});
    return;
  }
#pragma omp parallel for schedule(static, 1) num_threads(static_cast <int>(pieces))
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = n * piece / pieces, end = n * (piece + 1) / pieces;
    body(begin, end, piece);
  }
}

}  // namespace fox::kernels
