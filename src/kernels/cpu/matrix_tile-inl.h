// Small matrix products on blocks that lie in the caches, included once for each instruction set: the arithmetic of
// forgetting attention's tiles and of the recurrences' chunks.
#if defined(FOX_KERNELS_CPU_MATRIX_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOX_KERNELS_CPU_MATRIX_TILE_INL_H_
#undef FOX_KERNELS_CPU_MATRIX_TILE_INL_H_
#else
#define FOX_KERNELS_CPU_MATRIX_TILE_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"

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

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
