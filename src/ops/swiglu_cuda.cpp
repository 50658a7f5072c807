#include "kernels/cuda/swiglu.h"
#include "ops/cuda_common.h"
#include "ops/swiglu_schema.h"

namespace fox::ops {
namespace {

void launch(const at::Tensor& gate, const at::Tensor& value, const at::Tensor& out) {
  const SwigluInputs in(gate, value, out.scalar_type());
  dispatch_cuda(out.scalar_type(), [&]<class T, class>() {
    check_launch("swiglu", cuda::swiglu(in.params<cuda::SwigluParams<T>, T>(), mutable_data<T>(out), stream_of(out)));
  });
}

/// Into dgate and dvalue, whose rows are `stride` elements apart.
void launch_backward(const at::Tensor& dout, const at::Tensor& gate, const at::Tensor& value, const at::Tensor& dgate,
                     const at::Tensor& dvalue, int64_t stride) {
  const SwigluInputs in(gate, value, dgate.scalar_type());
  const auto dy = cast(dout, dgate.scalar_type()).contiguous();
  dispatch_cuda(dgate.scalar_type(), [&]<class T, class>() {
    check_launch("swiglu_backward",
                 cuda::swiglu_backward(in.params<cuda::SwigluParams<T>, T>(), data<T>(dy), mutable_data<T>(dgate),
                                       mutable_data<T>(dvalue), stride, stream_of(dgate)));
  });
}

at::Tensor forward_cuda(const at::Tensor& gate_up) {
  static const auto op = find_operator<SwigluForward>("fox::swiglu");
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto out = checked_results(op, gate_up);
  const auto halves = gate_up.chunk(2, -1);
  launch(halves[0], halves[1], out);
  return out;
}

at::Tensor backward_cuda(const at::Tensor& dout, const at::Tensor& gate_up) {
  static const auto op = find_operator<SwigluBackward>("fox::swiglu_backward");
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto dx = checked_results(op, dout, gate_up);
  const auto halves = gate_up.chunk(2, -1), gradients = dx.chunk(2, -1);
  launch_backward(dout, halves[0], halves[1], gradients[0], gradients[1], dx.size(-1));
  return dx;
}

at::Tensor forward_of_two_cuda(const at::Tensor& gate, const at::Tensor& value) {
  static const auto op = find_operator<SwigluOfTwoForward>("fox::swiglu_of_two");
  const c10::cuda::CUDAGuard guard(gate.device());
  auto out = checked_results(op, gate, value);
  launch(gate, value, out);
  return out;
}

SwigluOfTwoGradients backward_of_two_cuda(const at::Tensor& dout, const at::Tensor& gate, const at::Tensor& value) {
  static const auto op = find_operator<SwigluOfTwoBackward>("fox::swiglu_of_two_backward");
  const c10::cuda::CUDAGuard guard(gate.device());
  auto [dgate, dvalue] = checked_results(op, dout, gate, value);
  launch_backward(dout, gate, value, dgate, dvalue, gate.size(-1));
  return {dgate, dvalue};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("swiglu", forward_cuda);
  m.impl("swiglu_backward", backward_cuda);
  m.impl("swiglu_of_two", forward_of_two_cuda);
  m.impl("swiglu_of_two_backward", backward_of_two_cuda);
}

}  // namespace
}  // namespace fox::ops
