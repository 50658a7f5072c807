#include "kernels/cuda/attn_input.h"

#include "ops/attn_input.h"
#include "ops/attn_input_schema.h"
#include "ops/cuda_common.h"
#include "ops/rotary_table.h"

// fox::attn_input and its single steps fox::token_shift and fox::rotary: one kernel.
namespace fox::ops {
namespace {

/// Where documents begin at t > 0, (B, T), or an undefined tensor.
at::Tensor document_begins(const at::Tensor& x, const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  if (!cu_seqlens && !seq_start) return {};
  // One more column: cu_seqlens ends with T.
  auto mark = at::zeros({x.size(0), x.size(1) + 1}, x.options().dtype(at::kBool));
  if (cu_seqlens) mark.index_fill_(1, *cu_seqlens, true);
  if (seq_start) mark.scatter_(1, seq_start->unsqueeze(1), true);
  return mark.narrow(1, 0, x.size(1)).contiguous();
}

/// The tensors in the dtype and layout that the kernel reads; it must outlive the kernel's parameters.
struct Inputs {
  at::Tensor x, shift, prev, begins, weight;
  RotaryTable table;
  double eps = 0;
  bool shift_is_logit = false, inverse = false;

  explicit Inputs(const at::Tensor& x_in) : x(x_in.stride(3) == 1 ? x_in : x_in.contiguous()) {
    if (x.size(3) <= cuda::kAttnInputMaxDim) return;
    throw Error(fmt::format("head dimension {} on CUDA", x.size(3)),
                fmt::format("token shift, norm and rotation take up to {}", cuda::kAttnInputMaxDim));
  }
  Inputs(const at::Tensor& x_in, const AttnInputOptions& options) : Inputs(x_in) {
    if (options.shift_logits_BTH) {
      set_shift(*options.shift_logits_BTH, options.prev_BHD, options.cu_seqlens, options.seq_start);
    }
    shift_is_logit = true;
    if (options.norm_weight) {
      weight = cast(*options.norm_weight, compute_type(x.scalar_type())).contiguous();
      eps = options.norm_eps;
    }
    if (options.rotary_base) set_rotary(*options.rotary_base, options.rotary_offset);
  }

  void set_shift(const at::Tensor& alpha, const OptionalTensor& prev_in, const OptionalTensor& cu_seqlens,
                 const OptionalTensor& seq_start) {
    shift = cast(alpha, x.scalar_type());
    if (shift.stride(2) != 1) shift = shift.contiguous();
    if (prev_in) prev = cast(*prev_in, x.scalar_type()).contiguous();
    begins = document_begins(x, cu_seqlens, seq_start);
  }
  void set_rotary(double base, int64_t offset) {
    table = rotary_table(x.size(1), x.size(3), base, offset, x.options().dtype(compute_type(x.scalar_type())));
  }

  template <class T, class A>
  cuda::AttnInputParams<T, A> params() const {
    const bool shared = weight.defined() && weight.size(0) == x.size(3);
    return {.x = data<T>(x),
            .x_batch = x.stride(0),
            .x_time = x.stride(1),
            .x_head = x.stride(2),
            .batch = x.size(0),
            .time = x.size(1),
            .heads = x.size(2),
            .dim = x.size(3),
            .shift = data<T>(shift),
            .shift_batch = shift.defined() ? shift.stride(0) : 0,
            .shift_time = shift.defined() ? shift.stride(1) : 0,
            .shift_is_logit = shift_is_logit,
            .prev = data<T>(prev),
            .begins = data<bool>(begins),
            .weight = data<A>(weight),
            .weight_stride = shared ? 0 : x.size(3),
            .eps = static_cast<A>(eps),
            .cos = data<A>(table.cos),
            .sin = data<A>(table.sin),
            .inverse = inverse};
  }
};

void launch(const Inputs& in, const at::Tensor& y) {
  dispatch_cuda(y.scalar_type(), [&]<class T, class A>() {
    check_launch("attn_input", cuda::attn_input(in.params<T, A>(), mutable_data<T>(y), stream_of(y)));
  });
}

/// Fills the gradients; those of shift and prev may be of another dtype than x.
void launch_backward(const Inputs& in, const at::Tensor& dy, const at::Tensor& dx, at::Tensor& dshift,
                     at::Tensor& dprev, at::Tensor& dweight) {
  const auto type = dx.scalar_type();
  const auto in_x_type = [&](const at::Tensor& t) {
    return !t.defined() || t.scalar_type() == type ? t : at::empty(t.sizes(), t.options().dtype(type));
  };
  const auto own_shift = in_x_type(dshift), own_prev = in_x_type(dprev), g = packed(cast(dy, type));
  dispatch_cuda(type, [&]<class T, class A>() {
    const auto p = in.params<T, A>();
    at::Tensor partial;
    if (dweight.defined()) {
      partial = at::empty({cuda::attn_input_backward_partials(p), dweight.numel()}, in.weight.options());
    }
    const cuda::AttnInputGradients<T, A> gradients{.dx = mutable_data<T>(dx),
                                                   .dshift = mutable_data<T>(own_shift),
                                                   .dprev = mutable_data<T>(own_prev),
                                                   .partial = mutable_data<A>(partial)};
    check_launch("attn_input_backward", cuda::attn_input_backward(p, data<T>(g), gradients, stream_of(dx)));
    if (!dweight.defined()) return;
    dweight =
        dx.numel() == 0 ? dweight.zero_() : cast(sum_of_rows("attn_input_backward", partial), dweight.scalar_type());
  });
  if (dshift.defined()) dshift = cast(own_shift, dshift.scalar_type());
  if (dprev.defined()) dprev = cast(own_prev, dprev.scalar_type());
}

at::Tensor forward_cuda(const at::Tensor& x, const OptionalTensor& shift_logits, const OptionalTensor& prev,
                        const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start, const OptionalTensor& weight,
                        double eps, std::optional<double> base, int64_t offset) {
  static const auto op = find_operator<AttnInputForward>("fox::attn_input");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset);
  launch(Inputs(x, {shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset}), y);
  return y;
}

AttnInputGradients backward_cuda(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& shift_logits,
                                 const OptionalTensor& prev, const OptionalTensor& cu_seqlens,
                                 const OptionalTensor& seq_start, const OptionalTensor& weight, double eps,
                                 std::optional<double> base, int64_t offset) {
  static const auto op = find_operator<AttnInputBackward>("fox::attn_input_backward");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [dx, dshift, dprev, dweight] =
      checked_results(op, dy, x, shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset);
  Inputs in(x, {shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset});
  if (!shift_logits && !weight) {  // a rotation alone needs nothing but its own inverse
    in = Inputs(cast(dy, x.scalar_type()));
    if (base) in.set_rotary(*base, offset);
    in.inverse = true;
    launch(in, dx);
  } else {
    launch_backward(in, dy, dx, dshift, dprev, dweight);
  }
  return {dx, dshift, dprev, dweight};
}

at::Tensor shift_cuda(const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                      const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                  const OptionalTensor&, const OptionalTensor&)>("fox::token_shift");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, alpha, prev, cu_seqlens, seq_start);
  Inputs in(x);
  in.set_shift(alpha, prev, cu_seqlens, seq_start);
  launch(in, y);
  return y;
}

using ShiftGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

ShiftGradients shift_backward_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& alpha,
                                   const OptionalTensor& prev, const OptionalTensor& cu_seqlens,
                                   const OptionalTensor& seq_start) {
  static const auto op =
      find_operator<ShiftGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&)>("fox::token_shift_backward");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [dx, dalpha, dprev] = checked_results(op, dy, x, alpha, prev, cu_seqlens, seq_start);
  Inputs in(x);
  in.set_shift(alpha, prev, cu_seqlens, seq_start);
  at::Tensor no_weight;
  launch_backward(in, dy, dx, dalpha, dprev, no_weight);
  return {dx, dalpha, dprev};
}

at::Tensor rotate_cuda(const at::Tensor& x, double base, int64_t offset, bool inverse) {
  static const auto op = find_operator<at::Tensor(const at::Tensor&, double, int64_t)>("fox::rotary");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, base, offset);
  Inputs in(x);
  in.set_rotary(base, offset);
  in.inverse = inverse;
  launch(in, y);
  return y;
}
at::Tensor rotary_cuda(const at::Tensor& x, double base, int64_t offset) { return rotate_cuda(x, base, offset, false); }
at::Tensor rotary_backward_cuda(const at::Tensor& dy, double base, int64_t offset) {
  return rotate_cuda(dy, base, offset, true);
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("attn_input", forward_cuda);
  m.impl("attn_input_backward", backward_cuda);
  m.impl("token_shift", shift_cuda);
  m.impl("token_shift_backward", shift_backward_cuda);
  m.impl("rotary", rotary_cuda);
  m.impl("rotary_backward", rotary_backward_cuda);
}

}  // namespace
}  // namespace fox::ops
