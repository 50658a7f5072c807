// The arithmetic of forgetting attention on one block, included once for each instruction set: small matrix products,
// 2^x, transposition. The score tile is kept transposed, a row a key and a column a query: maximum, sum and every
// other per-query quantity is then a vector across columns, and no lane is ever added to its neighbour.
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

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class T>
using Tag = hn::ScalableTag<T>;
template <class T>
inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(Tag<T>()));

// Register block of the matrix products: 6 rows × 4 vectors fill 24 of the 32 registers of AVX-512, 6 × 2 fill 12 of
// the 16 that other processors have.
inline constexpr int kRows = 6;
inline constexpr int kVectors = HWY_TARGET <= HWY_AVX3 ? 4 : 2;

/// Rows of a packed matrix are whole vectors.
template <class T>
constexpr int64_t padded_dim(int64_t head_dim) {
  return (head_dim + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

/// c (R × V vectors) = or += a (R × depth) b (depth × V vectors).
template <int R, int V, bool kTransposed, class T>
HWY_INLINE void multiply_tile(const T* HWY_RESTRICT a, int64_t a_stride, const T* HWY_RESTRICT b, int64_t b_stride,
                              int64_t depth, bool add, T* HWY_RESTRICT c, int64_t c_stride) {
  const Tag<T> d;
  hn::Vec<Tag<T>> acc[R][V];
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < V; ++v) {
      acc[r][v] = add ? hn::LoadU(d, c + r * c_stride + v * kLanes<T>) : hn::Zero(d);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    hn::Vec<Tag<T>> bk[V];
    HWY_UNROLL(8)
    for (int v = 0; v < V; ++v) bk[v] = hn::LoadU(d, b + v * kLanes<T>);
    HWY_UNROLL(8)
    for (int r = 0; r < R; ++r) {
      const auto ak = hn::Set(d, kTransposed ? a[r] : a[r * a_stride]);
      HWY_UNROLL(8)
      for (int v = 0; v < V; ++v) acc[r][v] = hn::MulAdd(ak, bk[v], acc[r][v]);
    }
    a += kTransposed ? a_stride : 1;
    b += b_stride;
  }
  HWY_UNROLL(8)
  for (int r = 0; r < R; ++r) {
    HWY_UNROLL(8)
    for (int v = 0; v < V; ++v) hn::StoreU(acc[r][v], d, c + r * c_stride + v * kLanes<T>);
  }
}

/// Which part of a block of scores on the diagonal exists. Rows and columns count within the block.
enum class Triangle {
  kNone,        ///< all of it
  kOutput,      ///< c is the transposed scores: row n exists from column n - offset on
  kDepthBelow,  ///< c's row m is a query: it sums over the keys up to m + offset
  kDepthAbove,  ///< c's row n is a key: it sums over the queries from n - offset on
};

/// What multiply needs: c (rows × columns) = or += a (rows × depth) b (depth × columns), columns padded to vectors.
/// With kTransposed a is stored as (depth × rows).
template <class T>
struct Product {
  const T* a;
  int64_t a_stride;
  const T* b;
  int64_t b_stride;
  T* c;
  int64_t c_stride;
  int64_t rows, columns, depth;
  bool add = false;
  Triangle triangle = Triangle::kNone;
  int64_t offset = 0;
};

template <int R, bool kTransposed, class T>
HWY_INLINE void multiply_rows(const Product<T>& p, int64_t row, int64_t column, int64_t vectors) {
  int64_t begin = 0, end = p.depth;
  if (p.triangle == Triangle::kDepthBelow) end = std::min(end, row + R + p.offset);
  if (p.triangle == Triangle::kDepthAbove) begin = std::clamp<int64_t>(row - p.offset, 0, end);
  const T* a = p.a + (kTransposed ? begin * p.a_stride + row : row * p.a_stride + begin);
  const T* b = p.b + begin * p.b_stride + column;
  T* c = p.c + row * p.c_stride + column;
  const auto tile = [&]<int V>() HWY_ATTR {
    multiply_tile<R, V, kTransposed>(a, p.a_stride, b, p.b_stride, end - begin, p.add, c, p.c_stride);
  };
  if constexpr (kVectors == 4) {
    if (vectors >= 4) return tile.template operator()<4>();
    if (vectors == 3) return tile.template operator()<3>();
  }
  if (vectors >= 2) return tile.template operator()<2>();
  tile.template operator()<1>();
}

/// Columns outside, so that the slice of b (16 KB at depth 64) stays in the first-level cache while the rows pass.
template <bool kTransposed, class T>
HWY_NOINLINE void multiply(const Product<T>& p) {
  const int64_t columns = padded_dim<T>(p.columns);
  for (int64_t panel = 0; panel < columns; panel += kVectors * kLanes<T>) {
    const int64_t panel_end = std::min(columns, panel + kVectors * kLanes<T>);
    for (int64_t row = 0, step; row < p.rows; row += step) {
      int64_t column = panel;
      if (p.triangle == Triangle::kOutput) {
        column = std::max(column, (row - p.offset) / kLanes<T> * kLanes<T>);
      }
      const int64_t vectors = (panel_end - column) / kLanes<T>, left = p.rows - row;
      step = left >= kRows ? kRows : left >= 4 ? 4 : 1;
      if (vectors <= 0) continue;
      if (step == kRows) {
        multiply_rows<kRows, kTransposed>(p, row, column, vectors);
      } else if (step == 4) {
        multiply_rows<4, kTransposed>(p, row, column, vectors);
      } else {
        multiply_rows<1, kTransposed>(p, row, column, vectors);
      }
    }
  }
}

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
