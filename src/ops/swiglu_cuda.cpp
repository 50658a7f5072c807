#include "kernels/cuda/swiglu.h"
#include "ops/cuda_common.h"

namespace fox::ops {
namespace {

at::Tensor forward_cuda(const at::Tensor& gate_up) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&)>("fox::swiglu");
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto out = checked_results(op, gate_up);
  const auto x = as_rows(gate_up);
  dispatch_cuda(out.scalar_type(), [&]<class T, class>() {
    check_launch("swiglu",
                 cuda::swiglu(data<T>(x.tensor), x.stride, x.rows, x.width / 2, mutable_data<T>(out), stream_of(out)));
  });
  return out;
}

at::Tensor backward_cuda(const at::Tensor& dout, const at::Tensor& gate_up) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&, const at::Tensor&)>("fox::swiglu_backward");
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto dx = checked_results(op, dout, gate_up);
  const auto x = as_rows(gate_up);
  const auto dy = cast(dout, gate_up.scalar_type()).contiguous();
  dispatch_cuda(dx.scalar_type(), [&]<class T, class>() {
    check_launch("swiglu_backward", cuda::swiglu_backward(data<T>(dy), data<T>(x.tensor), x.stride, x.rows, x.width / 2,
                                                          mutable_data<T>(dx), stream_of(dx)));
  });
  return dx;
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("swiglu", forward_cuda);
  m.impl("swiglu_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
