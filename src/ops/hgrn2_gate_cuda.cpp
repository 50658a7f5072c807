#include "kernels/cuda/hgrn2_gate.h"
#include "kernels/cuda/sum_rows.h"
#include "ops/cuda_common.h"
#include "ops/hgrn2_gate_schema.h"

namespace fox::ops {
namespace {

/// The tensors as the kernels read them.
struct Hgrn2GateCall {
  Rows logits;
  at::Tensor lower;

  Hgrn2GateCall(const at::Tensor& logits_in, const OptionalTensor& lower_in) : logits(as_rows(logits_in)) {
    if (lower_in) lower = packed(cast(*lower_in, compute_type(logits_in.scalar_type())));
  }
  template <class T, class A>
  cuda::Hgrn2GateParams<T, A> params() const {
    return {.logits = data<T>(logits.tensor),
            .stride = logits.stride,
            .lower = data<A>(lower),
            .rows = logits.rows,
            .channels = logits.width};
  }
};

Hgrn2GateResults forward_cuda(const at::Tensor& logits, const OptionalTensor& lower) {
  static const auto op = find_operator<Hgrn2GateForward>("fox::hgrn2_gate");
  const c10::cuda::CUDAGuard guard(logits.device());
  auto [log_g, k] = checked_results(op, logits, lower);
  const Hgrn2GateCall call(logits, lower);
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
  const Hgrn2GateCall call(logits, lower);
  const auto d_log = packed(cast(dlog_g, compute_type(logits.scalar_type())));
  const auto d_k = packed(cast(dk, logits.scalar_type()));
  at::Tensor partials, sums;
  if (lower) {
    partials = at::empty({cuda::hgrn2_gate_partials(call.logits.rows), lower->size(0)}, call.lower.options());
    sums = at::empty_like(call.lower);
  }
  dispatch_cuda(logits.scalar_type(), [&, dlogits = dlogits]<class T, class A>() {
    const auto stream = stream_of(dlogits);
    check_launch("hgrn2_gate_backward",
                 cuda::hgrn2_gate_backward(call.params<T, A>(), data<A>(d_log), data<T>(d_k), mutable_data<T>(dlogits),
                                           mutable_data<A>(partials), stream));
    if (!lower) return;
    check_launch("hgrn2_gate_backward",
                 cuda::sum_rows(data<A>(partials), partials.size(0), partials.size(1), mutable_data<A>(sums), stream));
  });
  if (lower) dlower = cast(sums, lower->scalar_type());
  return {dlogits, dlower};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("hgrn2_gate", forward_cuda);
  m.impl("hgrn2_gate_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
