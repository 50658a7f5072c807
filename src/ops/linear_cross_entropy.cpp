#include "ops/linear_cross_entropy.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "kernels/cpu/softmax_xent.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

constexpr const char* kLinearCrossEntropyOp = "linear_cross_entropy";
using kernels::kIgnoredLabel;
/// total, loss_N, dx_NC, dw_VC; the gradients are undefined unless wanted.
using LinearCrossEntropyResults = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using LinearCrossEntropyGradients = std::tuple<at::Tensor, at::Tensor>;
using LinearCrossEntropyForward = LinearCrossEntropyResults(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                            const OptionalTensor&, bool, bool);
using LinearCrossEntropyBackward = LinearCrossEntropyGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                               const at::Tensor&, const at::Tensor&);

void check_linear_cross_entropy(const at::Tensor& x, const at::Tensor& w, const at::Tensor& labels,
                                const OptionalTensor& token_weight) {
  check_floating(kLinearCrossEntropyOp, "x", x);
  check_dim(kLinearCrossEntropyOp, "x", x, 2, "(N, C)");
  check_floating(kLinearCrossEntropyOp, "w", w);
  check_dim(kLinearCrossEntropyOp, "w", w, 2, "(V, C)");
  check_shape(kLinearCrossEntropyOp, "w", w, {w.size(0), x.size(1)}, "(V, C)");
  check_device(kLinearCrossEntropyOp, "w", w, "x", x);
  check_dtype(kLinearCrossEntropyOp, "labels", labels, at::kLong);
  check_shape(kLinearCrossEntropyOp, "labels", labels, {x.size(0)}, "(N,)");
  check_device(kLinearCrossEntropyOp, "labels", labels, "x", x);
  if (!token_weight) return;
  check_floating(kLinearCrossEntropyOp, "token_weight", *token_weight);
  check_shape(kLinearCrossEntropyOp, "token_weight", *token_weight, {x.size(0)}, "(N,)");
  check_device(kLinearCrossEntropyOp, "token_weight", *token_weight, "x", x);
}

/// How many labels count. Throws on one that is neither ignored nor a token.
int64_t count_labels(const at::Tensor& labels, int64_t vocab) {
  const int64_t* label = labels.const_data_ptr<int64_t>();
  int64_t count = 0;
  for (int64_t n = 0; n < labels.numel(); ++n) {
    if (label[n] == kIgnoredLabel) continue;
    if (label[n] < 0 || label[n] >= vocab) {
      throw Error(fmt::format("{}: labels[{}] is {}", kLinearCrossEntropyOp, n, label[n]),
                  fmt::format("labels are 0 to {}, or {} to ignore a token", vocab - 1, kIgnoredLabel));
    }
    ++count;
  }
  return count;
}

/// Rows of logits that exist at once: enough that the products of a chunk are large, few enough that the logits are
/// still in the cache when they are read again.
int64_t chunk_rows(int64_t rows, int64_t vocab) {
  constexpr int64_t kLogits = int64_t{1} << 18, kMinRows = 128;
  return std::clamp(kLogits / std::max<int64_t>(vocab, 1), std::min(kMinRows, rows), std::max<int64_t>(rows, 1));
}

LinearCrossEntropyResults linear_cross_entropy_forward_meta(const at::Tensor& x, const at::Tensor& w,
                                                            const at::Tensor& labels,
                                                            const OptionalTensor& token_weight, bool want_dx,
                                                            bool want_dw) {
  check_linear_cross_entropy(x, w, labels, token_weight);
  const auto options = x.options().dtype(compute_type(x.scalar_type()));
  return {at::empty({}, options), at::empty({x.size(0)}, options),
          want_dx ? at::empty(x.sizes(), x.options()) : at::Tensor(),
          want_dw ? at::empty(w.sizes(), w.options()) : at::Tensor()};
}

LinearCrossEntropyResults linear_cross_entropy_forward_cpu(const at::Tensor& x_in, const at::Tensor& w_in,
                                                           const at::Tensor& labels_in,
                                                           const OptionalTensor& token_weight, bool want_dx,
                                                           bool want_dw) {
  check_linear_cross_entropy(x_in, w_in, labels_in, token_weight);
  const auto type = compute_type(x_in.scalar_type());
  const auto x = cast(x_in, type), w = cast(w_in, type), labels = labels_in.contiguous();
  const auto weight = token_weight ? cast(*token_weight, type).contiguous() : at::Tensor();
  const int64_t rows = x.size(0), vocab = w.size(0), chunk = chunk_rows(rows, vocab);
  const double uniform_weight = 1.0 / static_cast<double>(std::max<int64_t>(count_labels(labels, vocab), 1));

  // A row length that is a multiple of a cache line keeps the matrix products on their fast path for odd vocabularies.
  const int64_t stride = (vocab + 15) / 16 * 16;
  const auto buffer = at::empty({chunk, stride}, x.options()).narrow(1, 0, vocab);
  const auto loss = at::empty({rows}, x.options());
  const at::Tensor dx = want_dx ? at::empty(x.sizes(), x.options()) : at::Tensor();
  const at::Tensor dw =
      want_dw ? (rows == 0 ? at::zeros(w.sizes(), x.options()) : at::empty(w.sizes(), x.options())) : at::Tensor();
  const auto w_t = w.t();
  double total = 0;
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t n = std::min(chunk, rows - begin);
    const auto x_chunk = x.narrow(0, begin, n);
    auto logits = buffer.narrow(0, 0, n);
    at::mm_out(logits, x_chunk, w_t);
    dispatch_real(type, [&]<class T>() {
      const kernels::SoftmaxXentParams<T> p{.logits = logits.mutable_data_ptr<T>(),
                                            .logits_stride = stride,
                                            .labels = labels.const_data_ptr<int64_t>() + begin,
                                            .weight = weight.defined() ? weight.const_data_ptr<T>() + begin : nullptr,
                                            .uniform_weight = uniform_weight,
                                            .rows = n,
                                            .vocab = vocab,
                                            .gradient = want_dx || want_dw};
      total += kernels::softmax_xent(p, loss.mutable_data_ptr<T>() + begin);
    });
    if (want_dx) {
      auto dx_chunk = dx.narrow(0, begin, n);
      at::mm_out(dx_chunk, logits, w);
    }
    if (want_dw) {
      auto dw_out = dw;
      at::addmm_out(dw_out, dw, logits.t(), x_chunk, /*beta=*/begin == 0 ? 0 : 1, /*alpha=*/1);
    }
  }
  return {at::full({}, total, x.options()), loss, cast(dx, x_in.scalar_type()), cast(dw, w_in.scalar_type())};
}

LinearCrossEntropyGradients linear_cross_entropy_backward_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                               const at::Tensor& dx, const at::Tensor& dw) {
  return {dx.defined() ? at::empty_like(dx) : dx, dw.defined() ? at::empty_like(dw) : dw};
}

/// Scales the gradients that forward left; takes x and w only so that a second derivative is noticed.
LinearCrossEntropyGradients backward_any(const at::Tensor& dtotal, const at::Tensor&, const at::Tensor&,
                                         const at::Tensor& dx, const at::Tensor& dw) {
  // Plain training calls backward on the loss itself: nothing to scale then. (Asking a CUDA tensor would stall.)
  if (dtotal.is_cpu() && dtotal.item<double>() == 1) return {dx, dw};
  return {dx.defined() ? dx * dtotal.to(dx.scalar_type()) : dx, dw.defined() ? dw * dtotal.to(dw.scalar_type()) : dw};
}

class LinearCrossEntropy : public torch::autograd::Function<LinearCrossEntropy> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                                const at::Tensor& w, const at::Tensor& labels,
                                                const OptionalTensor& token_weight, bool want_dx, bool want_dw) {
    static const auto op = find_operator<LinearCrossEntropyForward>("fox::linear_cross_entropy");
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [total, loss, dx, dw] = op.call(x, w, labels, token_weight, want_dx, want_dw);
    ctx->save_for_backward({x, w});
    // Not saved variables: backward hands them on and lets go, so that they become the gradients without a copy.
    ctx->saved_data["dx"] = dx;
    ctx->saved_data["dw"] = dw;
    ctx->mark_non_differentiable({loss});
    return {total, loss};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = find_operator<LinearCrossEntropyBackward>("fox::linear_cross_entropy_backward");
    if (ctx->saved_data.empty()) {
      throw Error("linear_cross_entropy: backward ran twice through the same loss",
                  "its gradients are handed on the first time; compute the loss again");
    }
    const auto dx = ctx->saved_data["dx"].toTensor(), dw = ctx->saved_data["dw"].toTensor();
    ctx->saved_data.clear();
    const auto saved = ctx->get_saved_variables();
    auto [dx_scaled, dw_scaled] = op.call(grads[0], saved[0], saved[1], dx, dw);
    return {dx_scaled, dw_scaled, {}, {}, {}, {}};
  }
};

LinearCrossEntropyResults linear_cross_entropy_forward_autograd(const at::Tensor& x, const at::Tensor& w,
                                                                const at::Tensor& labels,
                                                                const OptionalTensor& token_weight, bool want_dx,
                                                                bool want_dw) {
  static const auto op = find_operator<LinearCrossEntropyForward>("fox::linear_cross_entropy");
  if (wants_grad({&x, &w})) {
    auto out = LinearCrossEntropy::apply(x, w, labels, token_weight, x.requires_grad(), w.requires_grad());
    return {out[0], out[1], at::Tensor(), at::Tensor()};
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(x, w, labels, token_weight, want_dx, want_dw);
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(
      "linear_cross_entropy(Tensor x, Tensor w, Tensor labels, Tensor? token_weight=None, bool want_dx=False, "
      "bool want_dw=False) -> (Tensor total, Tensor loss, Tensor dx, Tensor dw)");
  m.def("linear_cross_entropy_backward(Tensor dtotal, Tensor x, Tensor w, Tensor dx, Tensor dw) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_forward_cpu);
  m.impl("linear_cross_entropy_backward", backward_any);
}
TORCH_LIBRARY_IMPL(fox, Meta, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_forward_meta);
  m.impl("linear_cross_entropy_backward", linear_cross_entropy_backward_meta);
}
TORCH_LIBRARY_IMPL(fox, Autograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_forward_autograd);
  m.impl("linear_cross_entropy_backward", once_differentiable());
}

}  // namespace

LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& x_NC, const at::Tensor& w_VC,
                                              const at::Tensor& labels_N,
                                              const std::optional<at::Tensor>& token_weight_N) {
  static const auto op = find_operator<LinearCrossEntropyForward>("fox::linear_cross_entropy");
  auto result = op.call(x_NC, w_VC, labels_N, token_weight_N, false, false);
  return {std::get<0>(result), std::get<1>(result)};
}

LinearCrossEntropyResult linear_cross_entropy_reference(const at::Tensor& x_NC, const at::Tensor& w_VC,
                                                        const at::Tensor& labels_N,
                                                        const std::optional<at::Tensor>& token_weight_N) {
  const auto type = compute_type(x_NC.scalar_type());
  const auto logits = at::mm(x_NC.to(type), w_VC.to(type).t());
  const auto counts = labels_N != kIgnoredLabel;
  const auto label_logit = logits.gather(1, labels_N.clamp_min(0).unsqueeze(1)).squeeze(1);
  const auto loss = at::where(counts, at::logsumexp(logits, 1) - label_logit, at::zeros({}, logits.options()));
  const auto weight = token_weight_N ? token_weight_N->to(type) : 1 / counts.sum().clamp_min(1).to(type);
  return {(loss * weight).sum(), loss.detach()};
}

}  // namespace fox::ops
