#include "ops/mamba.h"

#include <limits>

#include "kernels/cpu/mamba.h"
#include "ops/common.h"
#include "ops/scan_cpu.h"

namespace fox::ops {
namespace {

constexpr const char* kMambaOp = "mamba";

/// The inputs, checked, padding set to 0: it neither decays nor writes.
struct MambaInputs {
  at::Tensor x, dt, a, b, c, d, first;
  at::Tensor starts_1T;  // whether a document starts at the token; (1, 0) when there is one

  MambaInputs(const at::Tensor& x_in, const at::Tensor& dt_in, const at::Tensor& a_in, const at::Tensor& b_in,
              const at::Tensor& c_in, const at::Tensor& d_in, const RecurrenceOptions& options) {
    for (const auto* t : {&x_in, &dt_in, &a_in, &b_in, &c_in, &d_in}) check_floating(kMambaOp, "an input", *t);
    check_dim(kMambaOp, "x", x_in, 3, "(B, T, I)");
    check_dim(kMambaOp, "b", b_in, 3, "(B, T, N)");
    const int64_t B = x_in.size(0), T = x_in.size(1), I = x_in.size(2), N = b_in.size(2);
    check_shape(kMambaOp, "dt", dt_in, x_in.sizes(), "(B, T, I)");
    check_shape(kMambaOp, "a", a_in, {I, N}, "(I, N)");
    check_shape(kMambaOp, "b", b_in, {B, T, N}, "(B, T, N)");
    check_shape(kMambaOp, "c", c_in, {B, T, N}, "(B, T, N)");
    check_shape(kMambaOp, "d", d_in, {I}, "(I,)");
    const std::vector<int64_t> state_shape{B, I, N};
    check_recurrence(kMambaOp, options, B, T, state_shape, "(B, I, N)");
    const auto type = compute_type(x_in.scalar_type());
    x = without_padding(x_in, options.seq_start);
    dt = without_padding(cast(dt_in, type), options.seq_start);
    a = cast(a_in, type);
    b = without_padding(b_in, options.seq_start);
    c = without_padding(c_in, options.seq_start);
    d = cast(d_in, type);
    first = initial_state(options, state_shape, dt);
    starts_1T = starts_or_empty(options, x);
  }
};

/// One token: the state after it, and what it reads.
RecurrenceResult mamba_step(const MambaInputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return cast(x.select(1, t), state.scalar_type()); };
  const auto dt = at_t(in.dt), x = at_t(in.x);
  const auto next = (dt.unsqueeze(-1) * in.a).exp() * state + (dt * x).unsqueeze(-1) * at_t(in.b).unsqueeze(1);
  return {at::matmul(next, at_t(in.c).unsqueeze(-1)).squeeze(-1) + in.d * x, next};
}

/// x, dt, b, c, starts_1T; a, d, in ATen calls for devices that have no kernel. The states are a scan of (decay, what
/// was written) pairs by doubling: after the round of stride s each token holds the last 2s tokens' worth.
RecurrenceResult run_mamba(at::TensorList inputs, const at::Tensor& before, int64_t) {
  const auto in = [&](size_t i) { return cast(inputs[i], before.scalar_type()); };
  const auto x = in(0), dt = in(1), a = in(5), d = in(6);
  const auto& starts = inputs[4];
  const int64_t length = x.size(1);
  auto log_decay = dt.unsqueeze(-1) * a;  // (B, C, I, N)
  if (starts.size(1) > 0) {
    log_decay = log_decay.masked_fill(starts.view({1, length, 1, 1}), -std::numeric_limits<double>::infinity());
  }
  auto decay = log_decay.exp();
  auto h = (dt * x).unsqueeze(-1) * in(2).unsqueeze(2);
  for (int64_t s = 1; s < length; s *= 2) {
    const auto early = [&](const at::Tensor& y) { return y.narrow(1, 0, length - s); };
    const auto late = [&](const at::Tensor& y) { return y.narrow(1, s, length - s); };
    const auto first = [&](const at::Tensor& y) { return y.narrow(1, 0, s); };
    h = at::cat({first(h), at::addcmul(late(h), late(decay), early(h))}, 1);
    decay = at::cat({first(decay), late(decay) * early(decay)}, 1);
  }
  h = at::addcmul(h, decay, before.unsqueeze(1));
  return {at::matmul(h, in(3).unsqueeze(-1)).squeeze(-1) + d * x, h.select(1, length - 1)};
}

/// The states of all tokens.
int64_t mamba_chunk_numbers(at::TensorList inputs, int64_t chunk) {
  return inputs[0].size(0) * chunk * inputs[5].numel();
}

/// The tensors as the CPU kernel reads them; they must outlive its parameters.
struct MambaKernelInputs {
  at::Tensor x, dt, b, c, starts, a, d, first;

  MambaKernelInputs(at::TensorList inputs, const at::Tensor& first_in) : first(first_in.contiguous()) {
    const auto plain = [&](size_t i) { return cast(inputs[i], first.scalar_type()).contiguous(); };
    x = plain(0), dt = plain(1), b = plain(2), c = plain(3), a = plain(5), d = plain(6);
    starts = inputs[4].contiguous();
  }
  template <class T>
  kernels::MambaParams<T> params() const {
    return {.x = x.const_data_ptr<T>(),
            .dt = dt.const_data_ptr<T>(),
            .b = b.const_data_ptr<T>(),
            .c = c.const_data_ptr<T>(),
            .a = a.const_data_ptr<T>(),
            .d = d.const_data_ptr<T>(),
            .first = first.const_data_ptr<T>(),
            .starts = starts.size(1) > 0 ? starts.const_data_ptr<bool>() : nullptr,
            .batch = x.size(0),
            .length = x.size(1),
            .channels = x.size(2),
            .states = b.size(2)};
  }
};

ScanResult mamba_forward_cpu(at::TensorList inputs, const at::Tensor& first, int64_t) {
  const MambaKernelInputs in(inputs, first);
  const auto y = at::empty_like(in.x), last = at::empty_like(in.first);
  const auto kept = room_for_states(kernels::mamba_chunks(in.x.size(1)) - 1, in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::mamba(in.params<T>(), y.mutable_data_ptr<T>(), last.mutable_data_ptr<T>(), kept.mutable_data_ptr<T>());
  });
  return {cast(y, inputs[0].scalar_type()), last, kept};
}

ScanGradients mamba_backward_cpu(const at::Tensor& d_y, const at::Tensor& dlast, at::TensorList inputs,
                                 const at::Tensor& first, const at::Tensor& kept, int64_t) {
  const MambaKernelInputs in(inputs, first);
  const auto dy = cast(d_y, first.scalar_type()).contiguous(), grad_last = dlast.contiguous();
  const auto dx = at::empty_like(in.x), ddt = at::empty_like(in.dt), db = at::empty_like(in.b);
  const auto dc = at::empty_like(in.c), da = at::empty_like(in.a), dd = at::empty_like(in.d);
  const auto dfirst = at::empty_like(in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::mamba_backward(in.params<T>(), kept.const_data_ptr<T>(),
                            kernels::MambaGradients<T>{.dy = dy.const_data_ptr<T>(),
                                                       .dlast = grad_last.const_data_ptr<T>(),
                                                       .dx = dx.mutable_data_ptr<T>(),
                                                       .ddt = ddt.mutable_data_ptr<T>(),
                                                       .db = db.mutable_data_ptr<T>(),
                                                       .dc = dc.mutable_data_ptr<T>(),
                                                       .da = da.mutable_data_ptr<T>(),
                                                       .dd = dd.mutable_data_ptr<T>(),
                                                       .dfirst = dfirst.mutable_data_ptr<T>()});
  });
  const auto as_input = [&](const at::Tensor& x, size_t i) { return cast(x, inputs[i].scalar_type()); };
  return {{as_input(dx, 0), as_input(ddt, 1), as_input(db, 2), as_input(dc, 3), at::empty_like(inputs[4]),
           as_input(da, 5), as_input(dd, 6)},
          dfirst};
}

TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("mamba_scan", mamba_forward_cpu);
  m.impl("mamba_scan_backward", mamba_backward_cpu);
}

}  // namespace

constinit const ScanOp kMambaScan{.name = kMambaOp,
                                  .scan = "fox::mamba_scan",
                                  .backward = "fox::mamba_scan_backward",
                                  .in_time = 5,
                                  .values = 0,
                                  .chunk_numbers = mamba_chunk_numbers,
                                  .run = run_mamba};

RecurrenceResult mamba(const at::Tensor& x_BTI, const at::Tensor& dt_BTI, const at::Tensor& a_IN,
                       const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_I,
                       const RecurrenceOptions& options) {
  const MambaInputs in(x_BTI, dt_BTI, a_IN, b_BTN, c_BTN, d_I, options);
  if (has_scan(x_BTI)) {
    return scan(kMambaScan, {in.x, in.dt, in.b, in.c, in.starts_1T, in.a, in.d}, in.first, options.chunk_size);
  }
  const auto result = mamba_step(in, 0, in.first);
  return {cast(result.o.unsqueeze(1), x_BTI.scalar_type()), result.state};
}

RecurrenceResult mamba_reference(const at::Tensor& x_BTI, const at::Tensor& dt_BTI, const at::Tensor& a_IN,
                                 const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_I,
                                 const RecurrenceOptions& options) {
  const MambaInputs in(x_BTI, dt_BTI, a_IN, b_BTN, c_BTN, d_I, options);
  std::vector<at::Tensor> y;
  auto state = in.first;
  for (int64_t t = 0; t < in.x.size(1); ++t) {
    const bool starts = in.starts_1T.size(1) > 0 && in.starts_1T[0][t].item<bool>();
    const auto result = mamba_step(in, t, starts ? at::zeros_like(state) : state);
    y.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(y, 1), x_BTI.scalar_type()), state};
}

// mamba() as an operator of the dispatcher, for callers from Python: a composition, differentiable as its parts are.
TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(recurrence_schema(kMambaOp, "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d").c_str(),
        [](const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
           const at::Tensor& d, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
           const OptionalTensor& seq_start, int64_t chunk_size) {
          const auto result =
              mamba(x, dt, a, b, c, d, recurrence_options(initial_state, cu_seqlens, seq_start, chunk_size));
          return std::make_tuple(result.o, result.state);
        });
}

}  // namespace fox::ops
