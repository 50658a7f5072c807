// The arithmetic of forgetting attention on one block beside its products (matrix_tile-inl.h), included once for each
// instruction set: transposition. The score tile is kept transposed, a row a key and a column a query: maximum, sum
// and every other per-query quantity is then a vector across columns, and no lane is ever added to its neighbour.
#if defined(FOX_KERNELS_CPU_FORGETTING_ATTN_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOX_KERNELS_CPU_FORGETTING_ATTN_TILE_INL_H_
#undef FOX_KERNELS_CPU_FORGETTING_ATTN_TILE_INL_H_
#else
#define FOX_KERNELS_CPU_FORGETTING_ATTN_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/cpu/forgetting_attn_plan.h"
#include "kernels/cpu/matrix_tile-inl.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// to (columns × 64) = the transpose of from (kBlock × columns, rows from_stride apart).
template <class T>
HWY_NOINLINE void transpose_block(const T* from, int64_t from_stride, int64_t columns, T* to) {
  // In squares of 8: a line of either side is then used whole before it leaves the first-level cache.
  for (int64_t c0 = 0; c0 < columns; c0 += 8) {
    for (int64_t r0 = 0; r0 < kBlock; r0 += 8) {
      for (int64_t c = c0; c < c0 + 8; ++c) {
        for (int64_t r = r0; r < r0 + 8; ++r) to[c * kBlock + r] = from[r * from_stride + c];
      }
    }
  }
}

/// Copies `rows` of `head_dim` numbers to rows of padded_dim, with zeros to the right and, up to kBlock rows, below,
/// and in rows below `first`: whatever padding holds, 0 · NaN must not enter a sum.
template <class T>
HWY_NOINLINE void pack_block(const T* from, int64_t stride, int64_t head_dim, int64_t first, int64_t rows, T* to) {
  const int64_t width = padded_dim<T>(head_dim);
  for (int64_t r = 0; r < kBlock; ++r, to += width) {
    const bool real = r >= first && r < rows;
    const int64_t n = real ? head_dim : 0;
    if (n > 0) std::copy_n(from + r * stride, n, to);
    std::fill(to + n, to + width, T(0));
  }
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
