#include "ops/mamba2.h"

#include <limits>

#include "ops/common.h"

namespace fox::ops {
namespace {

constexpr const char* kOp = "mamba2";

/// The inputs in the dtype of the computation, with padding and document starts written into them.
struct Inputs {
  at::Tensor x, dx;      // values, and values times their time step
  at::Tensor log_decay;  // dt a
  at::Tensor b, c, d_H1, first;

  Inputs(const at::Tensor& x_in, const at::Tensor& dt_in, const at::Tensor& a, const at::Tensor& b_in,
         const at::Tensor& c_in, const at::Tensor& d, const RecurrenceOptions& options) {
    for (const auto* t : {&x_in, &dt_in, &a, &b_in, &c_in, &d}) check_floating(kOp, "an input", *t);
    check_dim(kOp, "x", x_in, 4, "(B, T, H, P)");
    check_dim(kOp, "b", b_in, 3, "(B, T, N)");
    const int64_t B = x_in.size(0), T = x_in.size(1), H = x_in.size(2), N = b_in.size(2);
    check_shape(kOp, "dt", dt_in, {B, T, H}, "(B, T, H)");
    check_shape(kOp, "a", a, {H}, "(H,)");
    check_shape(kOp, "d", d, {H}, "(H,)");
    check_shape(kOp, "b", b_in, {B, T, N}, "(B, T, N)");
    check_shape(kOp, "c", c_in, {B, T, N}, "(B, T, N)");
    const std::vector<int64_t> state_shape{B, H, x_in.size(3), N};
    check_recurrence(kOp, options, B, T, state_shape, "(B, H, P, N)");
    const auto type = compute_type(x_in.scalar_type());
    const auto dt = without_padding(cast(dt_in, type), options.seq_start);
    x = without_padding(cast(x_in, type), options.seq_start);
    dx = x * dt.unsqueeze(-1);
    log_decay = with_resets(dt * cast(a, type), options);
    b = without_padding(cast(b_in, type), options.seq_start);
    c = without_padding(cast(c_in, type), options.seq_start);
    d_H1 = cast(d, type).unsqueeze(-1);
    first = initial_state(options, state_shape, x);
  }
};

/// One token: the state after it, and what it reads.
RecurrenceResult step(const Inputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return x.select(1, t); };
  const auto written = at_t(in.dx).unsqueeze(-1) * at_t(in.b).unsqueeze(1).unsqueeze(1);
  const auto next = at_t(in.log_decay).exp().unsqueeze(-1).unsqueeze(-1) * state + written;
  const auto read = at::matmul(next, at_t(in.c).unsqueeze(1).unsqueeze(-1)).squeeze(-1);
  return {read + in.d_H1 * at_t(in.x), next};
}

RecurrenceResult chunked(const Inputs& in, int64_t chunk_size) {
  const int64_t length = in.x.size(1), chunk = std::min(chunk_size, length);
  const auto dx = to_chunks(in.dx, chunk), log_decay = to_chunks(in.log_decay, chunk);
  const auto b = to_chunks(in.b.unsqueeze(2), chunk), c = to_chunks(in.c.unsqueeze(2), chunk);  // (B, 1, n, C, N)
  // Row i, column j: the log decays of j + 1 ... i. Each is a sum of its own, not a difference of prefix sums: nothing
  // cancels, and -inf, a reset, stays what it is.
  const auto spread = log_decay.unsqueeze(-1).expand({-1, -1, -1, -1, chunk});
  const auto sums = spread.tril(-1).cumsum(-2);
  const auto future = at::ones({chunk, chunk}, sums.options().dtype(at::kBool).requires_grad(false)).triu(1);
  const auto decay = sums.masked_fill(future, -std::numeric_limits<double>::infinity()).exp();
  const auto prefix = log_decay.cumsum(-1).exp().unsqueeze(-1);       // from the state before the chunk
  const auto suffix = decay.select(-2, chunk - 1).unsqueeze(-1);      // to the state behind it
  const auto added = at::matmul((dx * suffix).transpose(-1, -2), b);  // (B, H, n, P, N)
  const auto passes = prefix.select(-2, chunk - 1).unsqueeze(-1);
  const auto states = scan_chunks(passes, added, in.first);
  const auto y = at::matmul(at::matmul(c, b.transpose(-1, -2)) * decay, dx) +
                 at::matmul(c, states.before_BHnKV.transpose(-1, -2)) * prefix;
  return {from_chunks(y, length) + in.d_H1 * in.x, states.last_BHKV};
}

}  // namespace

RecurrenceResult mamba2(const at::Tensor& x_BTHP, const at::Tensor& dt_BTH, const at::Tensor& a_H,
                        const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_H,
                        const RecurrenceOptions& options) {
  const Inputs in(x_BTHP, dt_BTH, a_H, b_BTN, c_BTN, d_H, options);
  if (x_BTHP.size(1) > 1) {
    const auto result = chunked(in, options.chunk_size);
    return {cast(result.o, x_BTHP.scalar_type()), result.state};
  }
  const auto result = step(in, 0, in.first);
  return {cast(result.o.unsqueeze(1), x_BTHP.scalar_type()), result.state};
}

RecurrenceResult mamba2_reference(const at::Tensor& x_BTHP, const at::Tensor& dt_BTH, const at::Tensor& a_H,
                                  const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_H,
                                  const RecurrenceOptions& options) {
  const Inputs in(x_BTHP, dt_BTH, a_H, b_BTN, c_BTN, d_H, options);
  std::vector<at::Tensor> y;
  auto state = in.first;
  for (int64_t t = 0; t < in.x.size(1); ++t) {
    const auto result = step(in, t, state);
    y.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(y, 1), x_BTHP.scalar_type()), state};
}

}  // namespace fox::ops
