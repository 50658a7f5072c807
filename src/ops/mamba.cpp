#include "ops/mamba.h"

#include <torch/csrc/autograd/autograd.h>

#include <limits>

#include "base/error.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

constexpr const char* kOp = "mamba";

/// The inputs in the dtype of the computation, padding set to 0: it neither decays nor writes.
struct Inputs {
  at::Tensor x, dt, a, b, c, d, first;
  at::Tensor starts_T;  // whether a document starts at the token, or undefined

  Inputs(const at::Tensor& x_in, const at::Tensor& dt_in, const at::Tensor& a_in, const at::Tensor& b_in,
         const at::Tensor& c_in, const at::Tensor& d_in, const RecurrenceOptions& options) {
    for (const auto* t : {&x_in, &dt_in, &a_in, &b_in, &c_in, &d_in}) check_floating(kOp, "an input", *t);
    check_dim(kOp, "x", x_in, 3, "(B, T, I)");
    check_dim(kOp, "b", b_in, 3, "(B, T, N)");
    const int64_t B = x_in.size(0), T = x_in.size(1), I = x_in.size(2), N = b_in.size(2);
    check_shape(kOp, "dt", dt_in, x_in.sizes(), "(B, T, I)");
    check_shape(kOp, "a", a_in, {I, N}, "(I, N)");
    check_shape(kOp, "b", b_in, {B, T, N}, "(B, T, N)");
    check_shape(kOp, "c", c_in, {B, T, N}, "(B, T, N)");
    check_shape(kOp, "d", d_in, {I}, "(I,)");
    const std::vector<int64_t> state_shape{B, I, N};
    check_recurrence(kOp, options, B, T, state_shape, "(B, I, N)");
    const auto type = compute_type(x_in.scalar_type());
    x = without_padding(cast(x_in, type), options.seq_start);
    dt = without_padding(cast(dt_in, type), options.seq_start);
    a = cast(a_in, type);
    b = without_padding(cast(b_in, type), options.seq_start);
    c = without_padding(cast(c_in, type), options.seq_start);
    d = cast(d_in, type);
    first = initial_state(options, state_shape, x);
    if (options.cu_seqlens) starts_T = document_starts(options.cu_seqlens->to(x.device()), T);
  }
};

/// One token: the state after it, and what it reads.
RecurrenceResult step(const Inputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return x.select(1, t); };
  const auto dt = at_t(in.dt), x = at_t(in.x);
  const auto next = (dt.unsqueeze(-1) * in.a).exp() * state + (dt * x).unsqueeze(-1) * at_t(in.b).unsqueeze(1);
  return {at::matmul(next, at_t(in.c).unsqueeze(-1)).squeeze(-1) + in.d * x, next};
}

/// Tokens computed together, y without the skip d * x. The states are a scan of (decay, what was written) pairs by
/// doubling: after the round of stride s each token holds the last 2s tokens' worth.
RecurrenceResult scan_chunk(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                            const at::Tensor& c, const at::Tensor& starts, const at::Tensor& before) {
  const int64_t length = x.size(1);
  auto log_decay = dt.unsqueeze(-1) * a;  // (B, C, I, N)
  if (starts.defined()) {
    log_decay = log_decay.masked_fill(starts.view({1, length, 1, 1}), -std::numeric_limits<double>::infinity());
  }
  auto decay = log_decay.exp();
  auto h = (dt * x).unsqueeze(-1) * b.unsqueeze(2);
  for (int64_t s = 1; s < length; s *= 2) {
    const auto early = [&](const at::Tensor& y) { return y.narrow(1, 0, length - s); };
    const auto late = [&](const at::Tensor& y) { return y.narrow(1, s, length - s); };
    const auto first = [&](const at::Tensor& y) { return y.narrow(1, 0, s); };
    h = at::cat({first(h), at::addcmul(late(h), late(decay), early(h))}, 1);
    decay = at::cat({first(decay), late(decay) * early(decay)}, 1);
  }
  h = at::addcmul(h, decay, before.unsqueeze(1));
  return {at::matmul(h, c.unsqueeze(-1)).squeeze(-1), h.select(1, length - 1)};
}

/// scan_chunk over all chunks, each computed again in the backward pass.
class Scan : public torch::autograd::Function<Scan> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                                                const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b,
                                                const at::Tensor& c, const at::Tensor& first,
                                                const std::optional<at::Tensor>& starts, int64_t chunk) {
    std::vector<at::Tensor> y, before;
    auto state = first;
    for (int64_t t = 0; t < x.size(1); t += chunk) {
      const auto part = [&](const at::Tensor& z) { return z.narrow(1, t, std::min(chunk, x.size(1) - t)); };
      before.push_back(state);
      const auto result =
          scan_chunk(part(x), part(dt), a, part(b), part(c), part_of(value_or_undefined(starts), t, chunk), state);
      y.push_back(result.o);
      state = result.state;
    }
    ctx->save_for_backward({x, dt, a, b, c, value_or_undefined(starts), at::stack(before)});
    ctx->saved_data["chunk"] = chunk;
    return {at::cat(y, 1), state};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (at::GradMode::is_enabled()) {
      throw Error("mamba cannot be differentiated twice: fox operators have first derivatives only",
                  "leave out create_graph, or use the operator's reference");
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &a = saved[2], &starts = saved[5], &before = saved[6];
    const int64_t chunk = ctx->saved_data["chunk"].toInt();
    auto dstate = grads[1];
    at::Tensor da = at::zeros_like(a);
    std::vector<at::Tensor> dx, ddt, db, dc;
    for (int64_t i = before.size(0) - 1; i >= 0; --i) {
      const int64_t t = i * chunk, length = std::min(chunk, x.size(1) - t);
      const auto leaf = [&](const at::Tensor& z) { return z.detach().requires_grad_(); };
      const auto part = [&](const at::Tensor& z) { return leaf(z.narrow(1, t, length)); };
      const std::vector<at::Tensor> leaves{part(saved[0]), part(saved[1]), leaf(a),
                                           part(saved[3]), part(saved[4]), leaf(before[i])};
      const at::AutoGradMode recording(true);
      const auto result =
          scan_chunk(leaves[0], leaves[1], leaves[2], leaves[3], leaves[4], part_of(starts, t, chunk), leaves[5]);
      const auto d = torch::autograd::grad({result.o, result.state}, leaves, {grads[0].narrow(1, t, length), dstate});
      dx.push_back(d[0]), ddt.push_back(d[1]), db.push_back(d[3]), dc.push_back(d[4]);
      da = da + d[2];
      dstate = d[5];
    }
    for (auto* parts : {&dx, &ddt, &db, &dc}) std::reverse(parts->begin(), parts->end());
    return {at::cat(dx, 1), at::cat(ddt, 1), da, at::cat(db, 1), at::cat(dc, 1), dstate, {}, {}};
  }

 private:
  static at::Tensor part_of(const at::Tensor& starts, int64_t t, int64_t chunk) {
    return starts.defined() ? starts.narrow(0, t, std::min(chunk, starts.size(0) - t)) : starts;
  }
};

}  // namespace

RecurrenceResult mamba(const at::Tensor& x_BTI, const at::Tensor& dt_BTI, const at::Tensor& a_IN,
                       const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_I,
                       const RecurrenceOptions& options) {
  const Inputs in(x_BTI, dt_BTI, a_IN, b_BTN, c_BTN, d_I, options);
  if (x_BTI.size(1) == 1) {
    const auto result = step(in, 0, in.first);
    return {cast(result.o.unsqueeze(1), x_BTI.scalar_type()), result.state};
  }
  const auto results =
      Scan::apply(in.x, in.dt, in.a, in.b, in.c, in.first, optional_of(in.starts_T), options.chunk_size);
  return {cast(results[0] + in.d * in.x, x_BTI.scalar_type()), results[1]};
}

RecurrenceResult mamba_reference(const at::Tensor& x_BTI, const at::Tensor& dt_BTI, const at::Tensor& a_IN,
                                 const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_I,
                                 const RecurrenceOptions& options) {
  const Inputs in(x_BTI, dt_BTI, a_IN, b_BTN, c_BTN, d_I, options);
  std::vector<at::Tensor> y;
  auto state = in.first;
  for (int64_t t = 0; t < in.x.size(1); ++t) {
    const bool starts = in.starts_T.defined() && in.starts_T[t].item<bool>();
    const auto result = step(in, t, starts ? at::zeros_like(state) : state);
    y.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(y, 1), x_BTI.scalar_type()), state};
}

}  // namespace fox::ops
