#include "kernels/cuda/rotary.h"
#include "ops/cuda_common.h"
#include "ops/rotary_table.h"

namespace fox::ops {
namespace {

at::Tensor rotate_cuda(const at::Tensor& x_in, double base, int64_t offset, bool inverse) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&, double, int64_t)>("fox::rotary");
  const c10::cuda::CUDAGuard guard(x_in.device());
  auto y = checked_results(op, x_in, base, offset);
  const auto x = x_in.stride(3) == 1 ? x_in : x_in.contiguous();
  const auto table = rotary_table(x.size(1), x.size(3), base, offset, x.options().dtype(compute_type(x.scalar_type())));
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    const cuda::RotaryParams<T, A> p{.x = data<T>(x),
                                     .x_batch = x.stride(0),
                                     .x_time = x.stride(1),
                                     .x_head = x.stride(2),
                                     .cos = data<A>(table.cos),
                                     .sin = data<A>(table.sin),
                                     .batch = x.size(0),
                                     .time = x.size(1),
                                     .heads = x.size(2),
                                     .dim = x.size(3),
                                     .inverse = inverse};
    check_launch("rotary", cuda::rotary(p, mutable_data<T>(y), stream_of(x)));
  });
  return y;
}
at::Tensor forward_cuda(const at::Tensor& x, double base, int64_t offset) {
  return rotate_cuda(x, base, offset, false);
}
at::Tensor backward_cuda(const at::Tensor& dy, double base, int64_t offset) {
  return rotate_cuda(dy, base, offset, true);
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("rotary", forward_cuda);
  m.impl("rotary_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
