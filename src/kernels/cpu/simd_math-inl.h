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

/// 1 / (1 + e^-x).
template <class D>
HWY_INLINE hn::Vec<D> sigmoid(D d, hn::Vec<D> x) {
  const auto one = hn::Set(d, hn::TFromD<D>(1));
  return hn::Div(one, hn::Add(one, exp_checked(d, hn::Neg(x))));
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target guard
