#include "kernels/cuda/hgrn2_gate.h"
#include "ops/hgrn2_gate_schema.h"
#include "ops/logit_rows_cuda.h"

namespace fox::ops {
namespace {

Hgrn2GateResults forward_cuda(const at::Tensor& logits, const OptionalTensor& lower) {
  static const auto op = find_operator<Hgrn2GateForward>("fox::hgrn2_gate");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto [log_g, k] = checked_results(op, logits, lower);
  const LogitRowsCall call(logits, lower);
  dispatch_cuda(logits.scalar_type(), [&, log_g = log_g, k = k]<class T, class A>() {
    check_launch("hgrn2_gate",
                 cuda::hgrn2_gate(call.params<T, A>(), mutable_data<A>(log_g), mutable_data<T>(k), stream_of(k)));
  });
  return {log_g, k};
}

Hgrn2GateGradients backward_cuda(const at::Tensor& dlog_g, const at::Tensor& dk, const at::Tensor& logits,
                                 const OptionalTensor& lower) {
  static const auto op = find_operator<Hgrn2GateBackward>("fox::hgrn2_gate_backward");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto [dlogits, dlower] = checked_results(op, dlog_g, dk, logits, lower);
  const LogitRowsCall call(logits, lower);
  const auto d_log = packed(cast(dlog_g, compute_type(logits.scalar_type())));
  const auto d_k = packed(cast(dk, logits.scalar_type())), partials = call.partials();
  dispatch_cuda(logits.scalar_type(), [&, dlogits = dlogits]<class T, class A>() {
    check_launch("hgrn2_gate_backward",
                 cuda::hgrn2_gate_backward(call.params<T, A>(), data<A>(d_log), data<T>(d_k), mutable_data<T>(dlogits),
                                           mutable_data<A>(partials), stream_of(dlogits)));
  });
  if (lower) dlower = cast(sum_of_rows("hgrn2_gate_backward", partials), lower->scalar_type());
  return {dlogits, dlower};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("hgrn2_gate", forward_cuda);
  m.impl("hgrn2_gate_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
