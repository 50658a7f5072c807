#include "kernels/cuda/token_shift.h"
#include "ops/cuda_common.h"

namespace fox::ops {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Forward = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                           const OptionalTensor&);
using Backward = Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                           const OptionalTensor&, const OptionalTensor&);

/// The tensors in the dtype and layout that the kernel reads; it must outlive the kernel's parameters.
struct Inputs {
  at::Tensor x, alpha, prev, begins;

  Inputs(const at::Tensor& x_in, const at::Tensor& alpha_in, const OptionalTensor& prev_in,
         const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
    x = x_in.stride(3) == 1 ? x_in : x_in.contiguous();
    alpha = cast(alpha_in, x.scalar_type()).contiguous();
    if (prev_in) prev = cast(*prev_in, x.scalar_type()).contiguous();
    if (!cu_seqlens && !seq_start) return;
    // One more column: cu_seqlens ends with T.
    auto mark = at::zeros({x.size(0), x.size(1) + 1}, x.options().dtype(at::kBool));
    if (cu_seqlens) mark.index_fill_(1, *cu_seqlens, true);
    if (seq_start) mark.scatter_(1, seq_start->unsqueeze(1), true);
    begins = mark.narrow(1, 0, x.size(1)).contiguous();
  }

  template <class T>
  cuda::TokenShiftParams<T> params() const {
    return {.x = data<T>(x),
            .x_batch = x.stride(0),
            .x_time = x.stride(1),
            .x_head = x.stride(2),
            .alpha = data<T>(alpha),
            .prev = data<T>(prev),
            .begins = data<bool>(begins),
            .batch = x.size(0),
            .time = x.size(1),
            .heads = x.size(2),
            .dim = x.size(3)};
  }
};

at::Tensor forward_cuda(const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                        const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  static const auto op = find_operator<Forward>("fox::token_shift");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, alpha, prev, cu_seqlens, seq_start);
  const Inputs in(x, alpha, prev, cu_seqlens, seq_start);
  dispatch_cuda(x.scalar_type(), [&]<class T, class>() {
    check_launch("token_shift", cuda::token_shift(in.params<T>(), mutable_data<T>(y), stream_of(x)));
  });
  return y;
}

Gradients backward_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                        const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  static const auto op = find_operator<Backward>("fox::token_shift_backward");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [dx, dalpha, dprev] = checked_results(op, dy, x, alpha, prev, cu_seqlens, seq_start);
  const Inputs in(x, alpha, prev, cu_seqlens, seq_start);
  const auto g = cast(dy, x.scalar_type()).contiguous();
  // The kernel writes x's dtype; the gradients have those of their arguments.
  const auto own_alpha = dalpha.scalar_type() == x.scalar_type() ? dalpha : at::empty(dalpha.sizes(), x.options());
  const auto own_prev = !prev || dprev.scalar_type() == x.scalar_type() ? dprev : at::empty(dprev.sizes(), x.options());
  dispatch_cuda(x.scalar_type(), [&]<class T, class>() {
    check_launch("token_shift_backward",
                 cuda::token_shift_backward(in.params<T>(), data<T>(g), mutable_data<T>(dx), mutable_data<T>(own_alpha),
                                            mutable_data<T>(own_prev), stream_of(x)));
  });
  return {dx, cast(own_alpha, alpha.scalar_type()), prev ? cast(own_prev, prev->scalar_type()) : dprev};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("token_shift", forward_cuda);
  m.impl("token_shift_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
