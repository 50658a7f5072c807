#pragma once

#include <cstdint>

namespace fox::kernels {

/// Labels with this value do not count.
inline constexpr int64_t kIgnoredLabel = -100;

template <class T>
struct SoftmaxXentParams {
  T* logits;              ///< rows × vocab; overwritten by the gradient when `gradient`
  int64_t logits_stride;  ///< elements from row to row
  const int64_t* labels;  ///< (rows,): kIgnoredLabel or in [0, vocab) (the caller has checked)
  const T* weight;        ///< (rows,), or nullptr for `uniform_weight`
  double uniform_weight;
  int64_t rows, vocab;
  bool gradient;  ///< logits become d(Σ weight loss)/d logits = weight (softmax - onehot)
};

/// loss[n] = logsumexp(logits[n]) - logits[n, label[n]], 0 where the label is ignored. Returns Σ weight loss.
template <class T>
double softmax_xent(const SoftmaxXentParams<T>& p, T* loss);

}  // namespace fox::kernels
