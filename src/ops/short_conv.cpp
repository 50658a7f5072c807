#include "ops/short_conv.h"

#include <algorithm>

#include "base/error.h"
#include "kernels/cpu/short_conv.h"
#include "ops/common.h"
#include "ops/recurrence.h"
#include "ops/short_conv_schema.h"

namespace fox::ops {
namespace {

void check_short_conv(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& before, const OptionalTensor& cu_seqlens) {
  constexpr const char* kOp = "short_conv";
  check_floating(kOp, "x", x);
  check_dim(kOp, "x", x, 3, "(B, T, C)");
  check_floating(kOp, "weight", weight);
  check_dim(kOp, "weight", weight, 2, "(K, C)");
  check_shape(kOp, "weight", weight, {weight.size(0), x.size(2)}, "(K, C)");
  check_device(kOp, "weight", weight, "x", x);
  if (weight.size(0) == 0) throw Error("short_conv: weight has no taps", "K is at least 1");
  const auto check_option = [&](const char* name, const OptionalTensor& t, at::IntArrayRef shape, const char* layout) {
    if (!t) return;
    check_floating(kOp, name, *t);
    check_shape(kOp, name, *t, shape, layout);
    check_device(kOp, name, *t, "x", x);
  };
  check_option("bias", bias, {x.size(2)}, "(C,)");
  check_option("before", before, {x.size(0), weight.size(0) - 1, x.size(2)}, "(B, K - 1, C)");
  if (!cu_seqlens) return;
  check_cu_seqlens(kOp, *cu_seqlens, x.size(0), x.size(1));
  if (before) throw Error("short_conv: before and cu_seqlens exclude each other", "packed documents begin with 0");
}

/// The tensors in the dtype and layout that the kernel reads; it must outlive the kernel's parameters.
struct ShortConvInputs {
  at::Tensor x, weight, bias, before, reach;

  ShortConvInputs(const at::Tensor& x_in, const at::Tensor& weight_in, const OptionalTensor& bias_in,
                  const OptionalTensor& before_in, const OptionalTensor& cu_seqlens) {
    const auto type = compute_type(x_in.scalar_type());
    x = cast(x_in, type);
    if (x.stride(2) != 1) x = x.contiguous();
    weight = cast(weight_in, type).contiguous();
    if (bias_in) bias = cast(*bias_in, type).contiguous();
    if (before_in) before = cast(*before_in, type).contiguous();
    if (cu_seqlens) reach = tokens_before(cu_seqlens->cpu(), x.size(1));
  }

  template <class T>
  kernels::ShortConvParams<T> params() const {
    const auto data = [](const at::Tensor& t) { return t.defined() ? t.const_data_ptr<T>() : nullptr; };
    return {.x = data(x),
            .x_batch = x.stride(0),
            .x_time = x.stride(1),
            .weight = data(weight),
            .bias = data(bias),
            .before = data(before),
            .reach = reach.defined() ? reach.const_data_ptr<int64_t>() : nullptr,
            .batch = x.size(0),
            .time = x.size(1),
            .channels = x.size(2),
            .taps = weight.size(0)};
  }
};

at::Tensor short_conv_forward_meta(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                                   const OptionalTensor& before, const OptionalTensor& cu_seqlens) {
  check_short_conv(x, weight, bias, before, cu_seqlens);
  return at::empty(x.sizes(), x.options());
}

at::Tensor short_conv_forward_cpu(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                                  const OptionalTensor& before, const OptionalTensor& cu_seqlens) {
  check_short_conv(x, weight, bias, before, cu_seqlens);
  const ShortConvInputs in(x, weight, bias, before, cu_seqlens);
  const auto y = at::empty(x.sizes(), in.x.options());
  dispatch_real(y.scalar_type(), [&]<class T>() { kernels::short_conv(in.params<T>(), y.mutable_data_ptr<T>()); });
  return cast(y, x.scalar_type());
}

ShortConvGradients short_conv_backward_meta(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                            const OptionalTensor& bias, const OptionalTensor& before,
                                            const OptionalTensor& cu_seqlens) {
  check_short_conv(x, weight, bias, before, cu_seqlens);
  check_shape("short_conv_backward", "dy", dy, x.sizes(), "(B, T, C)");
  const auto like = [](const at::Tensor& t) { return at::empty(t.sizes(), t.options()); };
  return {like(x), like(weight), bias ? like(*bias) : at::Tensor(), before ? like(*before) : at::Tensor()};
}

ShortConvGradients short_conv_backward_cpu(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
                                           const OptionalTensor& bias, const OptionalTensor& before,
                                           const OptionalTensor& cu_seqlens) {
  check_short_conv(x, weight, bias, before, cu_seqlens);
  check_shape("short_conv_backward", "dy", dy, x.sizes(), "(B, T, C)");
  const ShortConvInputs in(x, weight, bias, before, cu_seqlens);
  const auto g = cast(dy, in.x.scalar_type()).contiguous();
  const auto room = [&](const at::Tensor& t) { return at::empty(t.sizes(), in.x.options()); };
  const auto dx = room(x), dweight = room(weight);
  const at::Tensor dbias = bias ? room(*bias) : at::Tensor(), dbefore = before ? room(*before) : at::Tensor();
  dispatch_real(dx.scalar_type(), [&]<class T>() {
    const auto data = [](const at::Tensor& t) { return t.defined() ? t.mutable_data_ptr<T>() : nullptr; };
    kernels::short_conv_backward(in.params<T>(), g.const_data_ptr<T>(),
                                 {data(dx), data(dweight), data(dbias), data(dbefore)});
  });
  return {cast(dx, x.scalar_type()), cast(dweight, weight.scalar_type()),
          bias ? cast(dbias, bias->scalar_type()) : dbias, before ? cast(dbefore, before->scalar_type()) : dbefore};
}

class ShortConv : public torch::autograd::Function<ShortConv> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const OptionalTensor& before,
                            const OptionalTensor& cu_seqlens) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward(
        {x, weight, value_or_undefined(bias), value_or_undefined(before), value_or_undefined(cu_seqlens)});
    return short_conv(x, weight, bias, before, cu_seqlens);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<ShortConvBackward>("fox::short_conv_backward");
    const auto saved = ctx->get_saved_variables();
    auto [dx, dweight, dbias, dbefore] =
        op.call(grads[0], saved[0], saved[1], optional_of(saved[2]), optional_of(saved[3]), optional_of(saved[4]));
    return {dx, dweight, dbias, dbefore, {}};
  }
};

at::Tensor short_conv_forward_autograd(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                                       const OptionalTensor& before, const OptionalTensor& cu_seqlens) {
  const auto b = value_or_undefined(bias), tokens = value_or_undefined(before);
  if (wants_grad({&x, &weight, &b, &tokens})) {
    if (!is_composed_short_conv(x, weight)) return ShortConv::apply(x, weight, bias, before, cu_seqlens);
    check_short_conv(x, weight, bias, before, cu_seqlens);
    return short_conv_reference(x, weight, bias, before, cu_seqlens);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return short_conv(x, weight, bias, before, cu_seqlens);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(
      "short_conv(Tensor x, Tensor weight, Tensor? bias=None, Tensor? before=None, Tensor? cu_seqlens=None) "
      "-> Tensor");
  m.def(
      "short_conv_backward(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? before, Tensor? cu_seqlens) "
      "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dbefore)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("short_conv", short_conv_forward_cpu);
  m.impl("short_conv_backward", short_conv_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("short_conv", short_conv_forward_meta);
  m.impl("short_conv_backward", short_conv_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("short_conv", short_conv_forward_autograd);
  m.impl("short_conv_backward", once_differentiable());
}

}  // namespace

at::Tensor short_conv(const at::Tensor& x_BTC, const at::Tensor& weight_KC, const std::optional<at::Tensor>& bias_C,
                      const std::optional<at::Tensor>& before_BSC, const std::optional<at::Tensor>& cu_seqlens) {
  static const auto op = find_operator<ShortConvForward>("fox::short_conv");
  return op.call(x_BTC, weight_KC, bias_C, before_BSC, cu_seqlens);
}

at::Tensor short_conv_reference(const at::Tensor& x_BTC, const at::Tensor& weight_KC,
                                const std::optional<at::Tensor>& bias_C, const std::optional<at::Tensor>& before_BSC,
                                const std::optional<at::Tensor>& cu_seqlens) {
  const int64_t length = x_BTC.size(1), past = weight_KC.size(0) - 1;
  const auto type = compute_type(x_BTC.scalar_type());
  const auto x = cast(x_BTC, type), w_KC = cast(weight_KC, type);
  const auto before = before_BSC ? cast(*before_BSC, type) : at::zeros({x.size(0), past, x.size(2)}, x.options());
  const auto whole = at::cat({before, x}, 1);
  at::Tensor document_T;
  if (cu_seqlens) document_T = document_numbers(cu_seqlens->to(x.device()), length);
  const auto y = x * w_KC[past];
  for (int64_t s = 1; s <= (before_BSC ? past : std::min(past, length - 1)); ++s) {
    auto shifted = whole.narrow(1, past - s, length);
    if (document_T.defined()) {
      const auto other = document_T.narrow(0, s, length - s) != document_T.narrow(0, 0, length - s);
      const auto outside = at::constant_pad_nd(other, {s, 0}, 1);  // there is nothing before the first token
      shifted = shifted.masked_fill(outside.view({1, length, 1}), 0.0);
    }
    y.addcmul_(shifted, w_KC[past - s]);  // no gradient needs what y was before
  }
  if (bias_C) y.add_(cast(*bias_C, type));
  return cast(at::silu(y), x_BTC.scalar_type());
}

}  // namespace fox::ops
