// Per-target helpers of the kernels: included once for each instruction set, hence the toggling guard.
#if defined(FOX_KERNELS_CPU_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FOX_KERNELS_CPU_SIMD_MATH_INL_H_
#undef FOX_KERNELS_CPU_SIMD_MATH_INL_H_
#else
#define FOX_KERNELS_CPU_SIMD_MATH_INL_H_
#endif

#include <cstdint>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// Loads and stores of whole vectors, and of the first lanes alone (the others read as 0).
template <class D>
struct WholeVector {
  D d;
  HWY_INLINE hn::Vec<D> load(const hn::TFromD<D>* p) const { return hn::LoadU(d, p); }
  HWY_INLINE void store(hn::Vec<D> v, hn::TFromD<D>* p) const { hn::StoreU(v, d, p); }
  HWY_INLINE hn::Vec<D> keep(hn::Vec<D> v) const { return v; }
};
template <class D>
struct FirstLanes {
  D d;
  hn::Mask<D> mask;
  HWY_INLINE hn::Vec<D> load(const hn::TFromD<D>* p) const { return hn::MaskedLoad(mask, d, p); }
  HWY_INLINE void store(hn::Vec<D> v, hn::TFromD<D>* p) const { hn::BlendedStore(v, mask, d, p); }
  HWY_INLINE hn::Vec<D> keep(hn::Vec<D> v) const { return hn::IfThenElseZero(mask, v); }
};

/// Calls f(io, i) for i = 0, L, 2L, … below n; `io` loads and stores the lanes that lie below n.
template <class T, class F>
HWY_INLINE void for_each_vector(int64_t n, const F& f) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const WholeVector<decltype(d)> whole{d};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) f(whole, i);
  if (i < n) f(FirstLanes<decltype(d)>{d, hn::FirstN(d, static_cast<size_t>(n - i))}, i);
}

/// Calls f.operator()<V>(io, i) on [begin, end): blocks of V = kTogether whole vectors, then of one, whose lanes below
/// `end` io loads and stores.
inline constexpr int kTogether = 4;
template <class T, class F>
HWY_INLINE void for_each_block(int64_t begin, int64_t end, const F& f) {
  const hn::ScalableTag<T> d;
  const int64_t width = kTogether * static_cast<int64_t>(hn::Lanes(d));
  for (; begin + width <= end; begin += width) f.template operator()<kTogether>(WholeVector<decltype(d)>{d}, begin);
  for_each_vector<T>(end - begin, [&](const auto& io, int64_t i) HWY_ATTR { f.template operator()<1>(io, begin + i); });
}

template <class D>
HWY_INLINE hn::TFromD<D> sum_of_lanes(D d, hn::Vec<D> v) {
  return hn::GetLane(hn::SumOfLanes(d, v));
}

/// e^x. Highway's Exp gives 0 for NaN and wraps around above ln(max): a diverged model must stay visible as NaN or inf.
template <class D>
HWY_INLINE hn::Vec<D> exp_checked(D d, hn::Vec<D> x) {
  using T = hn::TFromD<D>;
  const auto top = hn::Set(d, static_cast<T>(sizeof(T) == 4 ? 88.7 : 709.7));
  const auto y = hn::Exp(d, hn::Min(x, top));
  const auto overflow = hn::Gt(x, top);
  return hn::IfThenElse(hn::IsNaN(x), x, hn::IfThenElse(overflow, hn::Inf(d), y));
}

/// The same for x that cannot be positive, as in a softmax.
template <class D>
HWY_INLINE hn::Vec<D> exp_nonpositive(D d, hn::Vec<D> x) {
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Exp(d, x));
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

/// 1 / (1 + e^-x).
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, hn::TFromD<D>(1));
  return hn::Div(one, hn::Add(one, exp_checked(d, hn::Neg(x))));
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
