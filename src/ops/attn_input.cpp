#include "ops/attn_input.h"

#include <fmt/format.h>

#include "base/error.h"
#include "ops/attn_input_schema.h"
#include "ops/common.h"
#include "ops/rms_norm.h"
#include "ops/rotary.h"
#include "ops/token_shift.h"

// The CPU side is a composition of the operators of each step.
namespace fox::ops {
namespace {

void check_attn_input(const at::Tensor& x, const AttnInputOptions& options) {
  constexpr const char* kOp = "attn_input";
  check_floating(kOp, "x", x);
  check_dim(kOp, "x", x, 4, "(B, T, H, D)");
  if (const auto& shift = options.shift_logits_BTH) {
    check_floating(kOp, "shift_logits", *shift);
    check_shape(kOp, "shift_logits", *shift, {x.size(0), x.size(1), x.size(2)}, "(B, T, H)");
    check_device(kOp, "shift_logits", *shift, "x", x);
  }
  if (const auto& prev = options.prev_BHD) {
    check_floating(kOp, "prev", *prev);
    check_shape(kOp, "prev", *prev, {x.size(0), x.size(2), x.size(3)}, "(B, H, D)");
    check_device(kOp, "prev", *prev, "x", x);
  }
  if (options.cu_seqlens) check_cu_seqlens(kOp, *options.cu_seqlens, x.size(0), x.size(1));
  if (options.seq_start) check_seq_start(kOp, *options.seq_start, x.size(0), x.size(1));
  if (const auto& weight = options.norm_weight) {
    check_floating(kOp, "norm_weight", *weight);
    check_device(kOp, "norm_weight", *weight, "x", x);
    const int64_t size = weight->dim() == 1 ? weight->size(0) : -1;
    if (size != x.size(3) && size != x.size(2) * x.size(3)) {
      throw Error(fmt::format("attn_input: norm_weight has shape {}", shape_string(weight->sizes())),
                  fmt::format("supported: ({},), or ({},) shared by the heads", x.size(2) * x.size(3), x.size(3)));
    }
  }
  if (options.rotary_base && (x.size(3) % 2 != 0 || !(*options.rotary_base > 0) || options.rotary_offset < 0)) {
    throw Error(fmt::format("attn_input: x has shape {}, rotary_base is {}, rotary_offset {}", shape_string(x.sizes()),
                            *options.rotary_base, options.rotary_offset),
                "for a rotation D is even, the base positive, the offset at least 0");
  }
}

at::Tensor attn_input_forward_meta(const at::Tensor& x, const OptionalTensor& shift_logits, const OptionalTensor& prev,
                                   const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start,
                                   const OptionalTensor& weight, double eps, std::optional<double> base,
                                   int64_t offset) {
  check_attn_input(x, {shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset});
  return at::empty(x.sizes(), x.options());
}

/// x after the token shift, in the compute type.
at::Tensor shifted(const at::Tensor& x, const at::Tensor& alpha, const OptionalTensor& prev,
                   const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start) {
  return alpha.defined() ? token_shift(x, alpha, prev, cu_seqlens, seq_start) : x;
}
at::Tensor alpha_of(const OptionalTensor& shift_logits, at::ScalarType type) {
  return shift_logits ? at::sigmoid(cast(*shift_logits, type)) : at::Tensor();
}

at::Tensor attn_input_forward_cpu(const at::Tensor& x, const OptionalTensor& shift_logits, const OptionalTensor& prev,
                                  const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start,
                                  const OptionalTensor& weight, double eps, std::optional<double> base,
                                  int64_t offset) {
  check_attn_input(x, {shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset});
  const auto type = compute_type(x.scalar_type());
  auto y = shifted(cast(x, type), alpha_of(shift_logits, type), prev, cu_seqlens, seq_start);
  if (weight) y = rms_norm(y.flatten(2), weight, eps, x.size(2)).view(x.sizes());
  if (base) y = rotary(y, *base, offset);
  if (!shift_logits && !weight && !base) y = y.clone();
  return cast(y, x.scalar_type());
}

AttnInputGradients attn_input_backward_meta(const at::Tensor& dy, const at::Tensor& x,
                                            const OptionalTensor& shift_logits, const OptionalTensor& prev,
                                            const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start,
                                            const OptionalTensor& weight, double eps, std::optional<double> base,
                                            int64_t offset) {
  check_attn_input(x, {shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset});
  check_shape("attn_input_backward", "dy", dy, x.sizes(), "that of x");
  const auto like = [](const OptionalTensor& t) { return t ? at::empty(t->sizes(), t->options()) : at::Tensor(); };
  return {at::empty(x.sizes(), x.options()), like(shift_logits), shift_logits ? like(prev) : at::Tensor(),
          like(weight)};
}

AttnInputGradients attn_input_backward_cpu(const at::Tensor& dy, const at::Tensor& x_in,
                                           const OptionalTensor& shift_logits, const OptionalTensor& prev,
                                           const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start,
                                           const OptionalTensor& weight, double eps, std::optional<double> base,
                                           int64_t offset) {
  static const auto rotate_back = find_operator<at::Tensor(const at::Tensor&, double, int64_t)>("fox::rotary_backward");
  static const auto norm_backward = find_operator<std::tuple<at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const OptionalTensor&, double, int64_t)>("fox::rms_norm_backward");
  static const auto shift_backward = find_operator<std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&, const OptionalTensor&,
      const OptionalTensor&)>("fox::token_shift_backward");
  check_attn_input(x_in, {shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset});
  check_shape("attn_input_backward", "dy", dy, x_in.sizes(), "that of x");
  const auto type = compute_type(x_in.scalar_type());
  const auto x = cast(x_in, type), alpha = alpha_of(shift_logits, type);
  auto g = cast(dy, type);
  if (base) g = rotate_back.call(g, *base, offset);
  at::Tensor dweight, dshift, dprev;
  if (weight) {
    const auto y = shifted(x, alpha, prev, cu_seqlens, seq_start);
    std::tie(g, dweight) = norm_backward.call(g.flatten(2), y.flatten(2), weight, eps, x.size(2));
    g = g.view(x.sizes());
  }
  if (shift_logits) {
    at::Tensor dalpha;
    std::tie(g, dalpha, dprev) = shift_backward.call(g, x, alpha, prev, cu_seqlens, seq_start);
    dshift = cast(at::sigmoid_backward(dalpha, alpha), shift_logits->scalar_type());
  }
  return {cast(g, x_in.scalar_type()), dshift, dprev, dweight};
}

class AttnInput : public torch::autograd::Function<AttnInput> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const OptionalTensor& shift_logits, const OptionalTensor& prev,
                            const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start,
                            const OptionalTensor& weight, double eps, std::optional<double> base, int64_t offset) {
    static const auto op = find_operator<AttnInputForward>("fox::attn_input");
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, value_or_undefined(shift_logits), value_or_undefined(prev),
                            value_or_undefined(cu_seqlens), value_or_undefined(seq_start), value_or_undefined(weight)});
    ctx->saved_data["eps"] = eps;
    if (base) ctx->saved_data["base"] = *base;
    ctx->saved_data["offset"] = offset;
    return op.call(x, shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<AttnInputBackward>("fox::attn_input_backward");
    const auto saved = ctx->get_saved_variables();
    const bool rotates = ctx->saved_data.count("base") > 0;
    auto [dx, dshift, dprev, dweight] = op.call(
        grads[0], saved[0], optional_of(saved[1]), optional_of(saved[2]), optional_of(saved[3]), optional_of(saved[4]),
        optional_of(saved[5]), ctx->saved_data["eps"].toDouble(),
        rotates ? std::optional(ctx->saved_data["base"].toDouble()) : std::nullopt, ctx->saved_data["offset"].toInt());
    return {dx, dshift, dprev, {}, {}, dweight, {}, {}, {}};
  }
};

at::Tensor attn_input_forward_autograd(const at::Tensor& x, const OptionalTensor& shift_logits,
                                       const OptionalTensor& prev, const OptionalTensor& cu_seqlens,
                                       const OptionalTensor& seq_start, const OptionalTensor& weight, double eps,
                                       std::optional<double> base, int64_t offset) {
  static const auto op = find_operator<AttnInputForward>("fox::attn_input");
  const auto shift = value_or_undefined(shift_logits), before = value_or_undefined(prev),
             w = value_or_undefined(weight);
  if (wants_grad({&x, &shift, &before, &w})) {
    return AttnInput::apply(x, shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, shift_logits, prev, cu_seqlens, seq_start, weight, eps, base, offset);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(
      "attn_input(Tensor x, Tensor? shift_logits=None, Tensor? prev=None, Tensor? cu_seqlens=None, "
      "Tensor? seq_start=None, Tensor? norm_weight=None, float norm_eps=0., float? rotary_base=None, "
      "int rotary_offset=0) -> Tensor");
  m.def(
      "attn_input_backward(Tensor dy, Tensor x, Tensor? shift_logits, Tensor? prev, Tensor? cu_seqlens, "
      "Tensor? seq_start, Tensor? norm_weight, float norm_eps, float? rotary_base, int rotary_offset) "
      "-> (Tensor dx, Tensor dshift_logits, Tensor dprev, Tensor dnorm_weight)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("attn_input", attn_input_forward_cpu);
  m.impl("attn_input_backward", attn_input_backward_cpu);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("attn_input", attn_input_forward_meta);
  m.impl("attn_input_backward", attn_input_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("attn_input", attn_input_forward_autograd);
  m.impl("attn_input_backward", once_differentiable());
}

}  // namespace

at::Tensor attn_input(const at::Tensor& x_BTHD, const AttnInputOptions& options) {
  static const auto op = find_operator<AttnInputForward>("fox::attn_input");
  if (!options.shift_logits_BTH && !options.norm_weight && !options.rotary_base) return x_BTHD;
  return op.call(x_BTHD, options.shift_logits_BTH, options.prev_BHD, options.cu_seqlens, options.seq_start,
                 options.norm_weight, options.norm_eps, options.rotary_base, options.rotary_offset);
}

at::Tensor attn_input_reference(const at::Tensor& x_BTHD, const AttnInputOptions& options) {
  auto y = x_BTHD;
  if (options.shift_logits_BTH) {
    y = token_shift_reference(y, at::sigmoid(*options.shift_logits_BTH), options.prev_BHD, options.cu_seqlens,
                              options.seq_start);
  }
  if (options.norm_weight) {
    y = rms_norm_reference(y.flatten(2), options.norm_weight, options.norm_eps, y.size(2)).view(y.sizes());
  }
  return options.rotary_base ? rotary_reference(y, *options.rotary_base, options.rotary_offset) : y;
}

}  // namespace fox::ops
