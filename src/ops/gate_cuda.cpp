#include "kernels/cuda/gate.h"
#include "ops/cuda_common.h"

namespace fox::ops {
namespace {

using Gradients = std::tuple<at::Tensor, at::Tensor>;

at::Tensor forward_cuda(const at::Tensor& logits, const std::optional<at::Tensor>& bias) {
  static const auto op =
      find_operator<at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&)>("fox::log_sigmoid_gate");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto log_f = checked_results(op, logits, bias);
  const auto x = logits.contiguous();
  const auto b = bias ? cast(*bias, log_f.scalar_type()).contiguous() : at::Tensor();
  const int64_t heads = x.size(-1), rows = heads == 0 ? 0 : x.numel() / heads;
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    check_launch("log_sigmoid_gate",
                 cuda::log_sigmoid_gate(data<T>(x), data<A>(b), mutable_data<A>(log_f), rows, heads, stream_of(x)));
  });
  return log_f;
}

Gradients backward_cuda(const at::Tensor& dlog_f, const at::Tensor& log_f) {
  static const auto op =
      find_operator<Gradients(const at::Tensor&, const at::Tensor&)>("fox::log_sigmoid_gate_backward");
  const c10::cuda::CUDAGuard guard(log_f.device());
  auto [dlogits, dbias] = checked_results(op, dlog_f, log_f);
  const auto dy = dlog_f.contiguous(), y = log_f.contiguous();
  dispatch_cuda(y.scalar_type(), [&]<class, class A>() {
    check_launch(
        "log_sigmoid_gate_backward",
        cuda::log_sigmoid_gate_backward(data<A>(dy), data<A>(y), mutable_data<A>(dlogits), y.numel(), stream_of(y)));
  });
  if (y.size(-1) > 0) at::sum_out(dbias, dlogits.view({-1, y.size(-1)}), 0);
  return {dlogits, dbias};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("log_sigmoid_gate", forward_cuda);
  m.impl("log_sigmoid_gate_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
