#include "kernels/cuda/rms_norm.h"
#include "ops/cuda_common.h"

namespace fox::ops {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor>;
using Forward = at::Tensor(const at::Tensor&, const OptionalTensor&, double, int64_t);
using Backward = Gradients(const at::Tensor&, const at::Tensor&, const OptionalTensor&, double, int64_t);

template <class T, class A>
cuda::RmsNormParams<T, A> params(const Rows& x, const at::Tensor& weight, double eps, int64_t num_groups) {
  const int64_t width = x.width / num_groups;
  const bool shared = weight.defined() && weight.size(0) == width;
  return {.x = data<T>(x.tensor),
          .x_stride = x.stride,
          .weight = data<A>(weight),
          .weight_stride = shared ? 0 : width,
          .rows = x.rows,
          .groups = num_groups,
          .width = width,
          .eps = static_cast<A>(eps)};
}

at::Tensor compute_weight(const OptionalTensor& weight, at::ScalarType type) {
  return weight ? cast(*weight, compute_type(type)).contiguous() : at::Tensor();
}

at::Tensor forward_cuda(const at::Tensor& x, const OptionalTensor& weight, double eps, int64_t num_groups) {
  static const auto op = find_operator<Forward>("fox::rms_norm");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, weight, eps, num_groups);
  const auto rows = as_rows(x);
  const auto w = compute_weight(weight, x.scalar_type());
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    check_launch("rms_norm", cuda::rms_norm(params<T, A>(rows, w, eps, num_groups), mutable_data<T>(y), stream_of(x)));
  });
  return y;
}

Gradients backward_cuda(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight, double eps,
                        int64_t num_groups) {
  static const auto op = find_operator<Backward>("fox::rms_norm_backward");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [dx, dweight] = checked_results(op, dy, x, weight, eps, num_groups);
  const auto rows = as_rows(x);
  const auto w = compute_weight(weight, x.scalar_type());
  const auto g = cast(dy, x.scalar_type()).contiguous();
  at::Tensor partial;
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    const auto p = params<T, A>(rows, w, eps, num_groups);
    if (weight) partial = at::empty({cuda::rms_norm_backward_partials(p), num_groups, p.width}, w.options());
    check_launch("rms_norm_backward",
                 cuda::rms_norm_backward(p, data<T>(g), mutable_data<T>(dx), mutable_data<A>(partial), stream_of(x)));
  });
  if (!weight) return {dx, dweight};
  if (x.numel() == 0) return {dx, dweight.zero_()};
  const bool shared = weight->size(0) != rows.width;
  const auto sum = shared ? partial.sum(at::IntArrayRef({0, 1})) : partial.sum(0).flatten();
  return {dx, cast(sum, weight->scalar_type())};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("rms_norm", forward_cuda);
  m.impl("rms_norm_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
