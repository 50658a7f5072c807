// Rows of a chunk of tokens, a vector of channels at a time, included once for each instruction set: in and out of a
// thread's memory, transposed, and under running products of decays.
#if defined(FOX_KERNELS_CPU_CHUNK_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOX_KERNELS_CPU_CHUNK_TILE_INL_H_
#undef FOX_KERNELS_CPU_CHUNK_TILE_INL_H_
#else
#define FOX_KERNELS_CPU_CHUNK_TILE_INL_H_
#endif

#include <hwy/aligned_allocator.h>

#include <initializer_list>
#include <utility>

#include "kernels/cpu/chunks.h"
#include "kernels/cpu/matrix_tile-inl.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// One piece of memory for arrays of these sizes, all 0.
template <class T>
hwy::AlignedFreeUniquePtr<T[]> allocate_arrays(std::initializer_list<std::pair<T**, int64_t>> arrays) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const auto lines = [](int64_t size) { return (size + kLine - 1) / kLine * kLine; };
  int64_t total = 0;
  for (const auto& [array, size] : arrays) total += lines(size);
  auto memory = hwy::AllocateAligned<T>(total);
  T* at = std::fill_n(memory.get(), total, T(0)) - total;
  for (const auto& [array, size] : arrays) *array = std::exchange(at, at + lines(size));
  return memory;
}

/// to (rows × padded columns) = f of each vector of from (rows × columns, rows `stride` apart), 0 to the right. The
/// chunk behind is asked for at the same time: these tensors pass through once and are in no near cache.
template <class T, class F>
HWY_INLINE void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t columns, T* to, const F& f) {
  const Tag<T> d;
  const int64_t width = padded_dim<T>(columns);
  for (int64_t r = 0; r < rows; ++r) {
    for_each_vector<T>(columns, [&](const auto& io, int64_t c) HWY_ATTR {
      __builtin_prefetch(from + (r + kChunk) * stride + c);
      hn::StoreU(io.keep(f(io.load(from + r * stride + c))), d, to + r * width + c);
    });
  }
}
template <class T>
HWY_NOINLINE void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t columns, T* to) {
  pack_rows(from, stride, rows, columns, to, [](auto x) HWY_ATTR { return x; });
}
template <class T>
HWY_NOINLINE void pack_rows_times(const T* from, int64_t stride, int64_t rows, int64_t columns, T factor, T* to) {
  const auto by = hn::Set(Tag<T>(), factor);
  pack_rows(from, stride, rows, columns, to, [&](auto x) HWY_ATTR { return hn::Mul(x, by); });
}

/// to (rows × columns, rows `stride` apart) = from (rows × padded columns) * factor.
template <class T>
HWY_NOINLINE void unpack_rows(const T* from, int64_t rows, int64_t columns, T factor, T* to, int64_t stride) {
  const Tag<T> d;
  const auto by = hn::Set(d, factor);
  const int64_t width = padded_dim<T>(columns);
  for (int64_t r = 0; r < rows; ++r) {
    for_each_vector<T>(columns, [&](const auto& io, int64_t c) HWY_ATTR {
      io.store(hn::Mul(hn::LoadU(d, from + r * width + c), by), to + r * stride + c);
    });
  }
}

// What follows takes whole vectors: rows of padded width, from multiples of a vector on.

/// y_r = factors[r] x_r.
template <class T>
HWY_NOINLINE void scale_rows(const T* factors, const T* x, int64_t rows, int64_t width, T* y) {
  const Tag<T> d;
  for (int64_t r = 0; r < rows; ++r) {
    const auto by = hn::Set(d, factors[r]);
    for (int64_t e = r * width; e < (r + 1) * width; e += kLanes<T>) {
      hn::Store(hn::Mul(by, hn::Load(d, x + e)), d, y + e);
    }
  }
}
template <class T>
void scale(T factor, T* x, int64_t size) {
  scale_rows(&factor, x, 1, size, x);
}

template <class T>
HWY_INLINE T dot(const T* x, const T* y, int64_t size) {
  const Tag<T> d;
  auto sum = hn::Zero(d);
  for (int64_t e = 0; e < size; e += kLanes<T>) sum = hn::MulAdd(hn::Load(d, x + e), hn::Load(d, y + e), sum);
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

/// to (columns × rows) = the transpose of from (rows × columns). Sides are rounded up to 4: what lies there is copied.
template <class T>
HWY_NOINLINE void transpose(const T* from, int64_t from_stride, int64_t rows, int64_t columns, T* to,
                            int64_t to_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
#else
  const hn::Full128<T> d;
  constexpr int64_t kSide = 16 / sizeof(T);
  for (int64_t r = 0; r < rows; r += kSide) {
    for (int64_t c = 0; c < columns; c += kSide) {
      const auto row = [&](int64_t i) HWY_ATTR { return hn::LoadU(d, from + (r + i) * from_stride + c); };
      const auto put = [&](auto low, auto high, int64_t i) HWY_ATTR {
        hn::StoreU(hn::InterleaveLower(d, low, high), d, to + (c + i) * to_stride + r);
        hn::StoreU(hn::InterleaveUpper(d, low, high), d, to + (c + i + 1) * to_stride + r);
      };
      if constexpr (kSide == 2) {
        put(row(0), row(1), 0);
      } else {
        const auto r0 = row(0), r1 = row(1), r2 = row(2), r3 = row(3);
        put(hn::InterleaveLower(d, r0, r2), hn::InterleaveLower(d, r1, r3), 0);
        put(hn::InterleaveUpper(d, r0, r2), hn::InterleaveUpper(d, r1, r3), 2);
      }
    }
  }
#endif
}

/// What pairs of tokens say, a row j an earlier one, a column i a later one (rows × rows, 64 apart), times `factor`;
/// 0 where i < j + diagonal.
template <class T>
HWY_NOINLINE void keep_future(T* pairs, int64_t rows, int64_t diagonal, T factor = 1) {
  const Tag<T> d;
  const auto by = hn::Set(d, factor);
  for (int64_t i = 0; i < rows; i += kLanes<T>) {
    const auto column = hn::Iota(d, static_cast<T>(i));
    for (int64_t j = 0; j < rows; ++j) {
      T* at = pairs + j * kChunk + i;
      const auto kept = hn::Ge(column, hn::Set(d, static_cast<T>(j + diagonal)));
      hn::StoreU(hn::IfThenElseZero(kept, hn::Mul(hn::LoadU(d, at), by)), d, at);
    }
  }
}

/// Calls f.operator()<V>(c) for columns c, c + V lanes, … below a multiple of a vector: V = 4 vectors at once, so that
/// chains of dependent products overlap, then one at a time.
template <class T, class F>
HWY_INLINE void for_each_columns(int64_t width, const F& f) {
  int64_t c = 0;
  for (; c + 4 * kLanes<T> <= width; c += 4 * kLanes<T>) f.template operator()<4>(c);
  for (; c < width; c += kLanes<T>) f.template operator()<1>(c);
}

/// y_i = x_i times the gates of rows 0 … i.
template <class T>
HWY_NOINLINE void prefix_products(const T* x, const T* g, int64_t rows, int64_t width, T* y) {
  const Tag<T> d;
  for_each_columns<T>(width, [&]<int V>(int64_t c) HWY_ATTR {
    hn::Vec<Tag<T>> gates[V];
    for (int v = 0; v < V; ++v) gates[v] = hn::Set(d, T(1));
    for (int64_t i = 0; i < rows; ++i) {
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const int64_t at = i * width + c + v * kLanes<T>;
        gates[v] = hn::Mul(gates[v], hn::LoadU(d, g + at));
        hn::StoreU(hn::Mul(hn::LoadU(d, x + at), gates[v]), d, y + at);
      }
    }
  });
}

/// y_j = x_j times the gates of rows j + 1 … rows - 1; `total`, if not null, all of them.
template <class T>
HWY_NOINLINE void suffix_products(const T* x, const T* g, int64_t rows, int64_t width, T* y, T* total = nullptr) {
  const Tag<T> d;
  for_each_columns<T>(width, [&]<int V>(int64_t c) HWY_ATTR {
    hn::Vec<Tag<T>> gates[V];
    for (int v = 0; v < V; ++v) gates[v] = hn::Set(d, T(1));
    for (int64_t j = rows - 1; j >= 0; --j) {
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const int64_t at = j * width + c + v * kLanes<T>;
        hn::StoreU(hn::Mul(hn::LoadU(d, x + at), gates[v]), d, y + at);
        gates[v] = hn::Mul(gates[v], hn::LoadU(d, g + at));
      }
    }
    for (int v = 0; total != nullptr && v < V; ++v) hn::StoreU(gates[v], d, total + c + v * kLanes<T>);
  });
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
