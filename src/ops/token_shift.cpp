#include "ops/token_shift.h"

#include "kernels/cpu/token_shift.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

using TokenShiftGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using TokenShiftForward = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
                                     const OptionalTensor&);
using TokenShiftBackward = TokenShiftGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);

void check_token_shift(const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                       const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  constexpr const char* kOp = "token_shift";
  check_floating(kOp, "x", x);
  check_dim(kOp, "x", x, 4, "(B, T, H, D)");
  check_floating(kOp, "alpha", alpha);
  check_shape(kOp, "alpha", alpha, {x.size(0), x.size(1), x.size(2)}, "(B, T, H)");
  check_device(kOp, "alpha", alpha, "x", x);
  if (prev) {
    check_floating(kOp, "prev", *prev);
    check_shape(kOp, "prev", *prev, {x.size(0), x.size(2), x.size(3)}, "(B, H, D)");
    check_device(kOp, "prev", *prev, "x", x);
  }
  if (cu_seqlens) check_cu_seqlens(kOp, *cu_seqlens, x.size(0), x.size(1));
  if (seq_start) check_seq_start(kOp, *seq_start, x.size(0), x.size(1));
}

/// The tensors in the dtype and layout that the kernel reads; it must outlive the kernel's parameters.
struct TokenShiftInputs {
  at::Tensor x, alpha, prev, cu_seqlens, seq_start;

  TokenShiftInputs(const at::Tensor& x_in, const at::Tensor& alpha_in, const OptionalTensor& prev_in,
                   const OptionalTensor& cu, const OptionalTensor& start) {
    const auto type = compute_type(x_in.scalar_type());
    x = cast(x_in, type);
    if (x.stride(3) != 1) x = x.contiguous();
    alpha = cast(alpha_in, type).contiguous();
    if (prev_in) prev = cast(*prev_in, type).contiguous();
    if (cu) cu_seqlens = cu->contiguous();
    if (start) seq_start = start->contiguous();
  }

  template <class T>
  kernels::TokenShiftParams<T> params() const {
    const auto indices = [](const at::Tensor& t) { return t.defined() ? t.const_data_ptr<int64_t>() : nullptr; };
    return {.x = x.const_data_ptr<T>(),
            .x_batch = x.stride(0),
            .x_time = x.stride(1),
            .x_head = x.stride(2),
            .alpha = alpha.const_data_ptr<T>(),
            .prev = prev.defined() ? prev.const_data_ptr<T>() : nullptr,
            .cu_seqlens = indices(cu_seqlens),
            .seq_start = indices(seq_start),
            .batch = x.size(0),
            .time = x.size(1),
            .heads = x.size(2),
            .dim = x.size(3),
            .num_documents = cu_seqlens.defined() ? cu_seqlens.size(0) - 1 : 0};
  }
};

at::Tensor token_shift_forward_meta(const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                                    const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  check_token_shift(x, alpha, prev, cu_seqlens, seq_start);
  return at::empty(x.sizes(), x.options());
}

at::Tensor token_shift_forward_cpu(const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                                   const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  check_token_shift(x, alpha, prev, cu_seqlens, seq_start);
  const TokenShiftInputs in(x, alpha, prev, cu_seqlens, seq_start);
  auto y = at::empty(x.sizes(), in.x.options());
  dispatch_real(y.scalar_type(), [&]<class T>() { kernels::token_shift(in.params<T>(), y.mutable_data_ptr<T>()); });
  return cast(y, x.scalar_type());
}

TokenShiftGradients token_shift_backward_meta(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& alpha,
                                              const OptionalTensor& prev, const OptionalTensor& cu_seqlens,
                                              const OptionalTensor& seq_start) {
  check_token_shift(x, alpha, prev, cu_seqlens, seq_start);
  check_shape("token_shift_backward", "dy", dy, x.sizes(), "(B, T, H, D)");
  return {at::empty(x.sizes(), x.options()), at::empty(alpha.sizes(), alpha.options()),
          prev ? at::empty(prev->sizes(), prev->options()) : at::Tensor()};
}

TokenShiftGradients token_shift_backward_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& alpha,
                                             const OptionalTensor& prev, const OptionalTensor& cu_seqlens,
                                             const OptionalTensor& seq_start) {
  check_token_shift(x, alpha, prev, cu_seqlens, seq_start);
  check_shape("token_shift_backward", "dy", dy, x.sizes(), "(B, T, H, D)");
  const TokenShiftInputs in(x, alpha, prev, cu_seqlens, seq_start);
  const auto g = cast(dy, in.x.scalar_type()).contiguous();
  auto dx = at::empty(x.sizes(), in.x.options());
  auto dalpha = at::empty(alpha.sizes(), in.x.options());
  const at::Tensor dprev = prev ? at::zeros(prev->sizes(), in.x.options()) : at::Tensor();
  dispatch_real(dx.scalar_type(), [&]<class T>() {
    kernels::token_shift_backward(in.params<T>(), g.const_data_ptr<T>(), dx.mutable_data_ptr<T>(),
                                  dalpha.mutable_data_ptr<T>(), prev ? dprev.mutable_data_ptr<T>() : nullptr);
  });
  return {cast(dx, x.scalar_type()), cast(dalpha, alpha.scalar_type()),
          prev ? cast(dprev, prev->scalar_type()) : dprev};
}

class TokenShift : public torch::autograd::Function<TokenShift> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& alpha,
                            const OptionalTensor& prev, const OptionalTensor& cu_seqlens,
                            const OptionalTensor& seq_start) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(
        {x, alpha, value_or_undefined(prev), value_or_undefined(cu_seqlens), value_or_undefined(seq_start)});
    return token_shift(x, alpha, prev, cu_seqlens, seq_start);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<TokenShiftBackward>("fox::token_shift_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dx, dalpha, dprev] =
        op.call(grads[0], saved[0], saved[1], optional_of(saved[2]), optional_of(saved[3]), optional_of(saved[4]));
    return {dx, dalpha, dprev, {}, {}};
  }
};

at::Tensor token_shift_forward_autograd(const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                                        const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  const auto before = value_or_undefined(prev);
  if (wants_grad({&x, &alpha, &before})) return TokenShift::apply(x, alpha, prev, cu_seqlens, seq_start);
  at::AutoDispatchBelowADInplaceOrView guard;
  return token_shift(x, alpha, prev, cu_seqlens, seq_start);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(
      "token_shift(Tensor x, Tensor alpha, Tensor? prev=None, Tensor? cu_seqlens=None, Tensor? seq_start=None) "
      "-> Tensor");
  m.def(
      "token_shift_backward(Tensor dy, Tensor x, Tensor alpha, Tensor? prev, Tensor? cu_seqlens, Tensor? seq_start) "
      "-> (Tensor dx, Tensor dalpha, Tensor dprev)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("token_shift", token_shift_forward_cpu);
  m.impl("token_shift_backward", token_shift_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("token_shift", token_shift_forward_meta);
  m.impl("token_shift_backward", token_shift_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("token_shift", token_shift_forward_autograd);
  m.impl("token_shift_backward", once_differentiable());
}

}  // namespace

at::Tensor token_shift(const at::Tensor& x_BTHD, const at::Tensor& alpha_BTH, const std::optional<at::Tensor>& prev_BHD,
                       const std::optional<at::Tensor>& cu_seqlens, const std::optional<at::Tensor>& seq_start) {
  static const auto op = find_operator<TokenShiftForward>("fox::token_shift");
  return op.call(x_BTHD, alpha_BTH, prev_BHD, cu_seqlens, seq_start);
}

at::Tensor token_shift_reference(const at::Tensor& x_BTHD, const at::Tensor& alpha_BTH,
                                 const std::optional<at::Tensor>& prev_BHD, const std::optional<at::Tensor>& cu_seqlens,
                                 const std::optional<at::Tensor>& seq_start) {
  const int64_t time = x_BTHD.size(1);
  const auto first =
      prev_BHD ? prev_BHD->unsqueeze(1).to(x_BTHD.scalar_type()) : at::zeros_like(x_BTHD.narrow(1, 0, 1));
  auto before = at::cat({first, x_BTHD.narrow(1, 0, time - 1)}, 1);
  const auto t = at::arange(time, x_BTHD.options().dtype(at::kLong)).unsqueeze(0);
  auto begins = at::zeros_like(t, at::kBool);
  if (cu_seqlens) begins = begins | at::isin(t, *cu_seqlens);
  if (seq_start) begins = begins | (t == seq_start->unsqueeze(1));
  before = before.masked_fill((begins & (t > 0)).unsqueeze(-1).unsqueeze(-1), 0);
  const auto alpha = alpha_BTH.unsqueeze(-1);
  return (alpha * before + (1 - alpha) * x_BTHD).to(x_BTHD.scalar_type());
}

}  // namespace fox::ops
