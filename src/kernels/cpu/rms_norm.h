#pragma once

#include <cstdint>

namespace fox::kernels {

template <class T>
struct RmsNormParams {
  const T* x;             ///< rows × (groups · width), each row contiguous
  int64_t x_stride;       ///< elements from row to row
  const T* weight;        ///< or nullptr for 1
  int64_t weight_stride;  ///< elements from group to group: width, or 0 where the groups share one weight
  int64_t rows, groups, width;
  double eps;
};

/// y (rows × groups · width, contiguous) = x / sqrt(mean(x²) + eps) * weight, the mean over each group.
template <class T>
void rms_norm(const RmsNormParams<T>& p, T* y);

/// Elements of rms_norm_backward's workspace: a weight gradient for each thread but the first.
template <class T>
int64_t rms_norm_backward_workspace(const RmsNormParams<T>& p);

/// dx (contiguous) and dweight (as weight; nullptr if not wanted) from dy (contiguous). The weight's gradient is summed
/// in an order that depends on the shape and the number of threads alone.
template <class T>
void rms_norm_backward(const RmsNormParams<T>& p, const T* dy, T* dx, T* dweight, T* workspace);

}  // namespace fox::kernels
