#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// As kernels/cpu/softmax_xent.h. T: __nv_bfloat16, __half, float, double; A: float, or double for double.
template <class T, class A>
struct SoftmaxXentParams {
  T* logits;              ///< rows × vocab; overwritten by the gradient when `gradient`
  int64_t logits_stride;  ///< elements from row to row
  const int64_t* labels;  ///< (rows,): -100 = ignored; one outside [0, vocab) makes the row's loss NaN
  const A* weight;        ///< (rows,)
  int64_t rows, vocab;
  bool gradient;  ///< logits become weight (softmax - onehot)
};

/// loss[n] = logsumexp(logits[n]) - logits[n, label[n]], 0 where the label is ignored.
template <class T, class A>
cudaError_t softmax_xent(const SoftmaxXentParams<T, A>& p, A* loss, cudaStream_t stream);

}  // namespace fox::cuda
