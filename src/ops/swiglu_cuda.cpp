#include "kernels/cuda/swiglu.h"
#include "ops/cuda_common.h"
#include "ops/swiglu_schema.h"

namespace fox::ops {
namespace {

at::Tensor forward_cuda(const at::Tensor& gate_up) {
  static const auto op = find_operator<SwigluForward>("fox::swiglu");
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto out = checked_results(op, gate_up);
  const auto halves = gate_up.chunk(2, -1);
  const SwigluInputs in(halves[0], halves[1], gate_up.scalar_type());
  dispatch_cuda(out.scalar_type(), [&]<class T, class>() {
    check_launch("swiglu", cuda::swiglu(in.params<cuda::SwigluParams<T>, T>(), mutable_data<T>(out), stream_of(out)));
  });
  return out;
}

at::Tensor backward_cuda(const at::Tensor& dout, const at::Tensor& gate_up) {
  static const auto op = find_operator<SwigluBackward>("fox::swiglu_backward");
  const c10::cuda::CUDAGuard guard(gate_up.device());
  auto dx = checked_results(op, dout, gate_up);
  const auto halves = gate_up.chunk(2, -1);
  const SwigluInputs in(halves[0], halves[1], gate_up.scalar_type());
  const auto dy = cast(dout, gate_up.scalar_type()).contiguous();
  dispatch_cuda(dx.scalar_type(), [&]<class T, class>() {
    T* dgate = mutable_data<T>(dx);
    check_launch("swiglu_backward", cuda::swiglu_backward(in.params<cuda::SwigluParams<T>, T>(), data<T>(dy), dgate,
                                                          dgate + in.gate.width, gate_up.size(-1), stream_of(dx)));
  });
  return dx;
}

at::Tensor forward_of_two_cuda(const at::Tensor& gate, const at::Tensor& value) {
  static const auto op = find_operator<SwigluOfTwoForward>("fox::swiglu_of_two");
  const c10::cuda::CUDAGuard guard(gate.device());
  auto out = checked_results(op, gate, value);
  const SwigluInputs in(gate, value, gate.scalar_type());
  dispatch_cuda(out.scalar_type(), [&]<class T, class>() {
    check_launch("swiglu", cuda::swiglu(in.params<cuda::SwigluParams<T>, T>(), mutable_data<T>(out), stream_of(out)));
  });
  return out;
}

SwigluOfTwoGradients backward_of_two_cuda(const at::Tensor& dout, const at::Tensor& gate, const at::Tensor& value) {
  static const auto op = find_operator<SwigluOfTwoBackward>("fox::swiglu_of_two_backward");
  const c10::cuda::CUDAGuard guard(gate.device());
  auto results = checked_results(op, dout, gate, value);
  const auto &dgate = std::get<0>(results), &dvalue = std::get<1>(results);
  const SwigluInputs in(gate, value, gate.scalar_type());
  const auto dy = cast(dout, gate.scalar_type()).contiguous();
  dispatch_cuda(gate.scalar_type(), [&]<class T, class>() {
    check_launch("swiglu_backward",
                 cuda::swiglu_backward(in.params<cuda::SwigluParams<T>, T>(), data<T>(dy), mutable_data<T>(dgate),
                                       mutable_data<T>(dvalue), in.gate.width, stream_of(dgate)));
  });
  return results;
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("swiglu", forward_cuda);
  m.impl("swiglu_backward", backward_cuda);
  m.impl("swiglu_of_two", forward_of_two_cuda);
  m.impl("swiglu_of_two_backward", backward_of_two_cuda);
}

}  // namespace
}  // namespace fox::ops
