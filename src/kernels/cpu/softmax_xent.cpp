// Softmax and cross-entropy of rows of logits that were just computed and still lie in the cache: maximum, exponentials
// with their sum, and (for the gradient) one scaling, all in place.
#include "kernels/cpu/softmax_xent.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/softmax_xent.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

template <class T>
HWY_INLINE T row_max(const T* x, int64_t n) {
  const hn::ScalableTag<T> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  if (n < lanes) return *std::max_element(x, x + n);
  auto top = hn::LoadU(d, x);
  for (int64_t i = lanes; i + lanes <= n; i += lanes) top = hn::Max(top, hn::LoadU(d, x + i));
  // The last vector overlaps its neighbour, which a maximum does not mind.
  top = hn::Max(top, hn::LoadU(d, x + n - lanes));
  return hn::GetLane(hn::MaxOfLanes(d, top));
}

/// Returns the row's loss and leaves exp(x - max) in x when `gradient`; `sum` is their sum.
template <class T>
HWY_INLINE T row_loss(T* x, int64_t n, int64_t label, bool gradient, T& sum) {
  const hn::ScalableTag<T> d;
  const T top = row_max(x, n), label_logit = x[label];
  const auto shift = hn::Set(d, top);
  auto sums = hn::Zero(d);
  for_each_vector<T>(n, [&](const auto& io, int64_t i) HWY_ATTR {
    const auto e = exp_nonpositive(io.d, hn::Sub(io.load(x + i), shift));
    if (gradient) io.store(e, x + i);
    sums = hn::Add(sums, io.keep(e));
  });
  sum = sum_of_lanes(d, sums);
  return std::log(sum) + (top - label_logit);
}

template <class T>
double rows_piece(const SoftmaxXentParams<T>& p, T* loss, int64_t begin, int64_t end) {
  const hn::ScalableTag<T> d;
  double total = 0;
  for (int64_t row = begin; row < end; ++row) {
    T* x = p.logits + row * p.logits_stride;
    const int64_t label = p.labels[row];
    if (label == kIgnoredLabel) {
      loss[row] = 0;
      if (p.gradient) std::fill_n(x, p.vocab, T(0));
      continue;
    }
    const T weight = p.weight == nullptr ? static_cast<T>(p.uniform_weight) : p.weight[row];
    T sum;
    loss[row] = row_loss(x, p.vocab, label, p.gradient, sum);
    total += static_cast<double>(weight) * static_cast<double>(loss[row]);
    if (!p.gradient) continue;
    const auto scale = hn::Set(d, weight / sum);
    for_each_vector<T>(p.vocab,
                       [&](const auto& io, int64_t i) HWY_ATTR { io.store(hn::Mul(io.load(x + i), scale), x + i); });
    x[label] -= weight;
  }
  return total;
}

double rows_f32(const SoftmaxXentParams<float>& p, float* loss, int64_t b, int64_t e) {
  return rows_piece(p, loss, b, e);
}
double rows_f64(const SoftmaxXentParams<double>& p, double* loss, int64_t b, int64_t e) {
  return rows_piece(p, loss, b, e);
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

HWY_EXPORT(rows_f32);
HWY_EXPORT(rows_f64);

double rows_piece(const SoftmaxXentParams<float>& p, float* loss, int64_t b, int64_t e) {
  return HWY_DYNAMIC_DISPATCH(rows_f32)(p, loss, b, e);
}
double rows_piece(const SoftmaxXentParams<double>& p, double* loss, int64_t b, int64_t e) {
  return HWY_DYNAMIC_DISPATCH(rows_f64)(p, loss, b, e);
}

}  // namespace

template <class T>
double softmax_xent(const SoftmaxXentParams<T>& p, T* loss) {
  const int64_t grain = 16384 / (p.vocab + 1) + 1;
  std::vector<double> totals(static_cast<size_t>(num_pieces(p.rows, grain)));
  parallel_pieces(p.rows, grain, [&](int64_t begin, int64_t end, int64_t piece) {
    totals[static_cast<size_t>(piece)] = rows_piece(p, loss, begin, end);
  });
  double total = 0;
  for (const double part : totals) total += part;
  return total;
}

template double softmax_xent(const SoftmaxXentParams<float>&, float*);
template double softmax_xent(const SoftmaxXentParams<double>&, double*);

}  // namespace fox::kernels
#endif
