// The arithmetic of forgetting attention on one block beside its products (matrix_tile-inl.h), included once for each
// instruction set: 2^x, transposition. The score tile is kept transposed, a row a key and a column a query: maximum, sum
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

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// 2^x for x from -inf up to 100; 0 below the smallest normal number, NaN for NaN and inf.
template <class D>
HWY_INLINE hn::Vec<D> exp2(D d, hn::Vec<D> x) {
  using T = hn::TFromD<D>;
  constexpr bool kFloat = sizeof(T) == 4;
  const hn::RebindToSigned<D> di;
  // Adding 1.5 · 2^(mantissa bits) leaves the nearest integer in the lowest bits, to shift into the exponent.
  const auto magic = hn::Set(d, static_cast<T>(kFloat ? 12582912.0 : 6755399441055744.0));
  const auto shifted = hn::Add(x, magic);
  const auto r = hn::Sub(x, hn::Sub(shifted, magic));
  hn::Vec<D> y;
  if constexpr (kFloat) {  // minimax on [-1/2, 1/2] (Cephes exp2f)
    y = hn::Set(d, 1.535336188319500e-4f);
    for (const float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, 2.402264791363012e-1f,
                          6.931472028550421e-1f, 1.f}) {
      y = hn::MulAdd(y, r, hn::Set(d, c));
    }
  } else {  // ln2^n / n! from n = 13 down; the next term is below 1e-17
    y = hn::Set(d, 1.3691488853904128e-12);
    for (const double c :
         {2.5678435993488206e-11, 4.4455382718708116e-10, 7.0549116208011233e-9, 1.0178086009239699e-7,
          1.3215486790144309e-6, 1.5252733804059840e-5, 1.5403530393381609e-4, 1.3333558146428443e-3,
          9.6181291076284771e-3, 5.5504108664821580e-2, 2.4022650695910071e-1, 6.9314718055994531e-1, 1.0}) {
      y = hn::MulAdd(y, r, hn::Set(d, c));
    }
  }
  const auto exponent = hn::ShiftLeft < kFloat ? 23 : 52 > (hn::BitCast(di, shifted));
  y = hn::BitCast(d, hn::Add(hn::BitCast(di, y), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, static_cast<T>(kFloat ? -126 : -1022))), y);
}

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
