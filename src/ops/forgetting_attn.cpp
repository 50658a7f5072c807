// The operator's contract with its backends.
//
//   fox::forgetting_attn(q, k, v, log_f?, scale?, window?, seq_start?, cu_seqlens?, log_pruning_tolerance?,
//                        logit_bound?, deterministic) -> (o, lse)
//   fox::forgetting_attn_backward(grad_o, q, k, v, log_f?, o, lse, scale? … deterministic) -> (dq, dk, dv, dlog_f)
//
// Shapes, dtypes and meaning are those of forgetting_attn() in the header. A backend gets tensors of any strides in any
// floating dtype and calls check_forgetting_attn first; o is contiguous (B, Tq, H, D) in q's dtype, lse contiguous
// (B, H, Tq), -inf where a row sees no key: float32 for bfloat16 and float16 inputs, else float64, since backward forms
// the weights from it. grad_o may have any strides. dlog_f is (B, Tk, H) in log_f's dtype, or an empty tensor (0,)
// without gates. Backward must skip the same blocks as forward did: both work that out from the same arguments.
// seq_start and cu_seqlens are on q's device.
#include "ops/forgetting_attn.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "kernels/cpu/forgetting_attn.h"
#include "ops/common.h"
#include "ops/forgetting_attn_call.h"
#include "ops/forgetting_attn_checks.h"
#include "ops/forgetting_attn_schema.h"

namespace fox::ops {
namespace {

/// dtype of the operator's lse for inputs of a dtype.
at::ScalarType lse_type(at::ScalarType type) { return compute_type(type) == type ? at::kDouble : at::kFloat; }

at::Tensor unit_stride(const at::Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

kernels::ForgettingAttnStrides strides(const at::Tensor& t) { return {t.stride(0), t.stride(1), t.stride(2)}; }

/// The kernel's view of a call; keeps what it points to alive.
template <class T>
struct Call {
  at::Tensor q, k, v, log_f, seq_start, cu_seqlens, logit_bound;
  kernels::ForgettingAttnParams<T> params;

  Call(const ForgettingAttnInputs& in, const ForgettingAttnOptions& options) {
    const auto type = c10::CppTypeToScalarType<T>::value;
    q = unit_stride(cast(in.q, type));
    k = unit_stride(cast(in.k, type));
    v = unit_stride(cast(in.v, type));
    auto& p = params;
    p.batch = q.size(0), p.q_len = q.size(1), p.heads = q.size(2), p.head_dim = q.size(3);
    p.k_len = k.size(1), p.kv_heads = k.size(2);
    p.q = q.const_data_ptr<T>(), p.k = k.const_data_ptr<T>(), p.v = v.const_data_ptr<T>();
    p.q_stride = strides(q), p.k_stride = strides(k), p.v_stride = strides(v);
    if (in.log_f) {
      log_f = *in.log_f;
      p.log_f = log_f.const_data_ptr<T>();
      p.log_f_stride = strides(log_f);
    }
    p.scale = options.scale.value_or(std::pow(static_cast<double>(p.head_dim), -0.5));
    if (options.window) p.window = *options.window;
    if (options.seq_start) {
      seq_start = options.seq_start->contiguous();
      p.seq_start = seq_start.const_data_ptr<int64_t>();
    }
    if (options.cu_seqlens) {
      cu_seqlens = options.cu_seqlens->contiguous();
      p.cu_seqlens = cu_seqlens.const_data_ptr<int64_t>();
      p.documents = cu_seqlens.size(0) - 1;
    }
    if (options.log_pruning_tolerance) p.log_pruning_tolerance = *options.log_pruning_tolerance;
    if (options.logit_bound) {
      logit_bound = options.logit_bound->to(at::kDouble).contiguous();
      p.logit_bound = logit_bound.const_data_ptr<double>();
    }
    p.threads = at::get_num_threads();
  }
};

template <class T>
void refuse_bad_gate(const kernels::ForgettingAttnParams<T>& params) {
  const auto bad = kernels::find_bad_gate(params);
  if (!bad.found()) return;
  const auto what = fmt::format("forgetting_attn: log_f[{}, {}, {}] is {}", bad.batch, bad.time, bad.head, bad.value);
  const char* hint = "a log forget gate is at most 0: use logsigmoid of the gate's logits";
  if (std::isnan(bad.value)) throw NonFiniteError(what, hint);
  throw Error(what, hint);
}

ForgettingAttnOutputs empty_result(const ForgettingAttnInputs& in) {
  const auto& q = in.q;
  return {at::empty(q.sizes(), q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(lse_type(q.scalar_type())))};
}

ForgettingAttnGradients empty_gradients(const ForgettingAttnInputs& in) {
  const auto like = [](const at::Tensor& t) { return at::empty(t.sizes(), t.options()); };
  return {like(in.q), like(in.k), like(in.v), in.log_f ? like(*in.log_f) : at::empty({0}, in.q.options())};
}

ForgettingAttnOutputs forgetting_attn_forward_cpu(const ForgettingAttnInputs& in,
                                                  const ForgettingAttnOptions& options) {
  const auto& q = in.q;
  const auto type = compute_type(q.scalar_type());
  auto o = at::empty(q.sizes(), q.options().dtype(type));
  auto lse = at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(at::kDouble));
  dispatch_real(type, [&]<class T>() {
    const Call<T> call(in, options);
    refuse_bad_gate(call.params);
    kernels::forgetting_attn_forward<T>(call.params, {o.mutable_data_ptr<T>(), lse.mutable_data_ptr<double>()});
  });
  return {cast(o, q.scalar_type()), cast(lse, lse_type(q.scalar_type()))};
}

ForgettingAttnGradients forgetting_attn_backward_cpu(const at::Tensor& grad_o, const ForgettingAttnInputs& in,
                                                     const at::Tensor& o, const at::Tensor& lse,
                                                     const ForgettingAttnOptions& options) {
  const auto type = compute_type(in.q.scalar_type());
  const auto d_o = cast(grad_o, type).contiguous(), out = cast(o, type).contiguous();
  const auto log_sum = cast(lse, at::kDouble).contiguous();
  const auto float_like = [&](const at::Tensor& t) { return at::empty(t.sizes(), t.options().dtype(type)); };
  auto dq = float_like(in.q), dk = float_like(in.k), dv = float_like(in.v);
  auto d_log_f = in.log_f ? float_like(*in.log_f) : at::empty({0}, in.q.options());
  dispatch_real(type, [&]<class T>() {
    const Call<T> call(in, options);
    kernels::forgetting_attn_backward<T>(
        call.params,
        {d_o.const_data_ptr<T>(), out.const_data_ptr<T>(), log_sum.const_data_ptr<double>(), dq.mutable_data_ptr<T>(),
         dk.mutable_data_ptr<T>(), dv.mutable_data_ptr<T>(), in.log_f ? d_log_f.mutable_data_ptr<T>() : nullptr});
  });
  return {cast(dq, in.q.scalar_type()), cast(dk, in.k.scalar_type()), cast(dv, in.v.scalar_type()), d_log_f};
}

class ForgettingAttn : public torch::autograd::Function<ForgettingAttn> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q,
                                                const at::Tensor& k, const at::Tensor& v, const OptionalTensor& log_f,
                                                const ForgettingAttnOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [o, lse] = call_forgetting_attn({q, k, v, log_f}, options);
    ctx->save_for_backward({q, k, v, value_or_undefined(log_f), o, lse, value_or_undefined(options.seq_start),
                            value_or_undefined(options.cu_seqlens), value_or_undefined(options.logit_bound)});
    keep_numbers(ctx, options);
    ctx->mark_non_differentiable({lse});
    return {o, lse};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    auto options = kept_numbers(ctx);
    options.seq_start = optional_of(saved[6]);
    options.cu_seqlens = optional_of(saved[7]);
    options.logit_bound = optional_of(saved[8]);
    const auto [dq, dk, dv, d_log_f] = call_forgetting_attn_backward(
        grads[0], {saved[0], saved[1], saved[2], optional_of(saved[3])}, saved[4], saved[5], options);
    return {dq, dk, dv, saved[3].defined() ? d_log_f : at::Tensor(), at::Tensor()};
  }
};

ForgettingAttnOutputs forgetting_attn_forward_autograd(const ForgettingAttnInputs& in,
                                                       const ForgettingAttnOptions& options) {
  const auto log_f = value_or_undefined(in.log_f);
  if (!wants_grad({&in.q, &in.k, &in.v, &log_f})) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return call_forgetting_attn(in, options);
  }
  check_forgetting_attn(in, options);
  const auto type = in.q.scalar_type();
  if (in.q.is_cpu() && type != compute_type(type)) {
    // Cast outside, so that backward sees the output before it is rounded.
    const auto wide = compute_type(type);
    const auto [o, lse] = call_forgetting_attn({in.q.to(wide), in.k.to(wide), in.v.to(wide), in.log_f}, options);
    return {o.to(type), lse.to(lse_type(type))};
  }
  const auto out = ForgettingAttn::apply(in.q, in.k, in.v, in.log_f, options);
  return {out[0], out[1]};
}

// The dispatcher's functions take every option as an argument: gather them once, here.
template <ForgettingAttnOutputs (*kKernel)(const ForgettingAttnInputs&, const ForgettingAttnOptions&), bool kCheck>
ForgettingAttnOutputs forward_entry(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const OptionalTensor& log_f, std::optional<double> scale,
                                    std::optional<int64_t> window, const OptionalTensor& seq_start,
                                    const OptionalTensor& cu_seqlens, std::optional<double> log_pruning_tolerance,
                                    const OptionalTensor& logit_bound, bool deterministic) {
  const ForgettingAttnInputs in{q, k, v, log_f};
  const ForgettingAttnOptions options{scale,       window,       seq_start, cu_seqlens, log_pruning_tolerance,
                                      logit_bound, deterministic};
  if (kCheck) check_forgetting_attn(in, options);
  return kKernel(in, options);
}

template <ForgettingAttnGradients (*kKernel)(const at::Tensor&, const ForgettingAttnInputs&, const at::Tensor&,
                                             const at::Tensor&, const ForgettingAttnOptions&)>
ForgettingAttnGradients backward_entry(const at::Tensor& grad_o, const at::Tensor& q, const at::Tensor& k,
                                       const at::Tensor& v, const OptionalTensor& log_f, const at::Tensor& o,
                                       const at::Tensor& lse, std::optional<double> scale,
                                       std::optional<int64_t> window, const OptionalTensor& seq_start,
                                       const OptionalTensor& cu_seqlens, std::optional<double> log_pruning_tolerance,
                                       const OptionalTensor& logit_bound, bool deterministic) {
  const ForgettingAttnInputs in{q, k, v, log_f};
  const ForgettingAttnOptions options{scale,       window,       seq_start, cu_seqlens, log_pruning_tolerance,
                                      logit_bound, deterministic};
  check_forgetting_attn(in, options);
  check_shape("forgetting_attn_backward", "grad_o", grad_o, q.sizes(), "(B, Tq, H, D)");
  check_shape("forgetting_attn_backward", "o", o, q.sizes(), "(B, Tq, H, D)");
  check_shape("forgetting_attn_backward", "lse", lse, {q.size(0), q.size(2), q.size(1)}, "(B, H, Tq)");
  check_dtype("forgetting_attn_backward", "lse", lse, lse_type(q.scalar_type()));
  return kKernel(grad_o, in, o, lse, options);
}

ForgettingAttnOutputs forgetting_attn_forward_meta(const ForgettingAttnInputs& in, const ForgettingAttnOptions&) {
  return empty_result(in);
}
ForgettingAttnGradients forgetting_attn_backward_meta(const at::Tensor&, const ForgettingAttnInputs& in,
                                                      const at::Tensor&, const at::Tensor&,
                                                      const ForgettingAttnOptions&) {
  return empty_gradients(in);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(
      "forgetting_attn(Tensor q, Tensor k, Tensor v, Tensor? log_f=None, float? scale=None, int? window=None, "
      "Tensor? seq_start=None, Tensor? cu_seqlens=None, float? log_pruning_tolerance=None, Tensor? logit_bound=None, "
      "bool deterministic=False) -> (Tensor, Tensor)");
  m.def(
      "forgetting_attn_backward(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor? log_f, Tensor o, Tensor lse, "
      "float? scale=None, int? window=None, Tensor? seq_start=None, Tensor? cu_seqlens=None, "
      "float? log_pruning_tolerance=None, Tensor? logit_bound=None, bool deterministic=False) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("forgetting_attn", forward_entry<forgetting_attn_forward_cpu, true>);
  m.impl("forgetting_attn_backward", backward_entry<forgetting_attn_backward_cpu>);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("forgetting_attn", forward_entry<forgetting_attn_forward_meta, true>);
  m.impl("forgetting_attn_backward", backward_entry<forgetting_attn_backward_meta>);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("forgetting_attn", forward_entry<forgetting_attn_forward_autograd, false>);
  m.impl("forgetting_attn_backward", once_differentiable());
}

}  // namespace

ForgettingAttnOutputs call_forgetting_attn(const ForgettingAttnInputs& in, const ForgettingAttnOptions& x) {
  static const auto op = find_operator<ForgettingAttnForward>("fox::forgetting_attn");
  return op.call(in.q, in.k, in.v, in.log_f, x.scale, x.window, x.seq_start, x.cu_seqlens, x.log_pruning_tolerance,
                 x.logit_bound, x.deterministic);
}

ForgettingAttnGradients call_forgetting_attn_backward(const at::Tensor& grad_o, const ForgettingAttnInputs& in,
                                                      const at::Tensor& o, const at::Tensor& lse,
                                                      const ForgettingAttnOptions& x) {
  static const auto op = find_operator<ForgettingAttnBackward>("fox::forgetting_attn_backward");
  return op.call(grad_o, in.q, in.k, in.v, in.log_f, o, lse, x.scale, x.window, x.seq_start, x.cu_seqlens,
                 x.log_pruning_tolerance, x.logit_bound, x.deterministic);
}

void keep_numbers(torch::autograd::AutogradContext* ctx, const ForgettingAttnOptions& options) {
  ctx->saved_data["scale"] = options.scale;
  ctx->saved_data["window"] = options.window;
  ctx->saved_data["log_pruning_tolerance"] = options.log_pruning_tolerance;
  ctx->saved_data["deterministic"] = options.deterministic;
}

ForgettingAttnOptions kept_numbers(torch::autograd::AutogradContext* ctx) {
  ForgettingAttnOptions options;
  options.scale = ctx->saved_data["scale"].toOptional<double>();
  options.window = ctx->saved_data["window"].toOptional<int64_t>();
  options.log_pruning_tolerance = ctx->saved_data["log_pruning_tolerance"].toOptional<double>();
  options.deterministic = ctx->saved_data["deterministic"].toBool();
  return options;
}

ForgettingAttnResult forgetting_attn(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD, const at::Tensor& v_BTHD,
                                     const std::optional<at::Tensor>& log_f_BTH, const ForgettingAttnOptions& options) {
  const ForgettingAttnInputs in{q_BTHD, k_BTHD, v_BTHD, log_f_BTH};
  check_forgetting_attn_device(q_BTHD);
  const auto [o, lse] = call_forgetting_attn(in, options);
  return {o, cast(lse, compute_type(q_BTHD.scalar_type()))};
}

at::Tensor forgetting_attn_kept_share(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD, const at::Tensor& log_f_BTH,
                                      const ForgettingAttnOptions& options) {
  at::NoGradGuard no_grad;
  const auto cpu = [](const OptionalTensor& t) { return t ? OptionalTensor(t->cpu()) : t; };
  const ForgettingAttnInputs in{q_BTHD.cpu(), k_BTHD.cpu(), k_BTHD.cpu(), log_f_BTH.cpu()};
  auto on_cpu = options;
  on_cpu.seq_start = cpu(options.seq_start);
  on_cpu.cu_seqlens = cpu(options.cu_seqlens);
  on_cpu.logit_bound = cpu(options.logit_bound);
  check_forgetting_attn(in, on_cpu);
  auto share = at::empty({in.q.size(0), in.q.size(2)}, at::kDouble);
  dispatch_real(compute_type(in.q.scalar_type()), [&]<class T>() {
    const Call<T> call(in, on_cpu);
    refuse_bad_gate(call.params);
    const auto kept = kernels::forgetting_attn_kept_share<T>(call.params);
    std::copy(kept.begin(), kept.end(), share.mutable_data_ptr<double>());
  });
  return share;
}

}  // namespace fox::ops
