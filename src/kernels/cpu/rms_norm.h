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
  const T* gate = nullptr;  ///< an output gate (a weight is there then): rows × (groups · width), each row contiguous
  int64_t gate_stride = 0;  ///< elements from row to row
  bool silu = false;        ///< its activation is z σ(z), not σ(z)
};

/// y (rows × groups · width, contiguous) = x / sqrt(mean(x²) + eps) * weight, the mean over each group; times the
/// gate's activation where there is a gate.
template <class T>
void rms_norm(const RmsNormParams<T>& p, T* y);

/// Elements of rms_norm_backward's workspace: a weight gradient for each thread but the first.
template <class T>
int64_t rms_norm_backward_workspace(const RmsNormParams<T>& p);

/// dx (contiguous), dweight (as weight; nullptr if not wanted) and dgate (contiguous; only with a gate) from dy
/// (contiguous). The weight's gradient is summed in an order that depends on the shape and the number of threads alone.
template <class T>
void rms_norm_backward(const RmsNormParams<T>& p, const T* dy, T* dx, T* dweight, T* workspace, T* dgate = nullptr);

}  // namespace fox::kernels
