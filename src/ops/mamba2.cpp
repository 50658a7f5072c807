#include "ops/mamba2.h"

#include <bit>
#include <limits>

#include "kernels/cpu/mamba2.h"
#include "ops/common.h"
#include "ops/scan_cpu.h"

namespace fox::ops {
namespace {

constexpr const char* kMamba2Op = "mamba2";

/// The inputs, checked, with padding and document starts written into them.
struct Mamba2Inputs {
  at::Tensor x, dt, log_decay;  // log_decay: dt a
  at::Tensor b, c, d, first;

  Mamba2Inputs(const at::Tensor& x_in, const at::Tensor& dt_in, const at::Tensor& a, const at::Tensor& b_in,
               const at::Tensor& c_in, const at::Tensor& d_in, const RecurrenceOptions& options) {
    for (const auto* t : {&x_in, &dt_in, &a, &b_in, &c_in, &d_in}) check_floating(kMamba2Op, "an input", *t);
    check_dim(kMamba2Op, "x", x_in, 4, "(B, T, H, P)");
    check_dim(kMamba2Op, "b", b_in, 3, "(B, T, N)");
    const int64_t B = x_in.size(0), T = x_in.size(1), H = x_in.size(2), N = b_in.size(2);
    check_shape(kMamba2Op, "dt", dt_in, {B, T, H}, "(B, T, H)");
    check_shape(kMamba2Op, "a", a, {H}, "(H,)");
    check_shape(kMamba2Op, "d", d_in, {H}, "(H,)");
    check_shape(kMamba2Op, "b", b_in, {B, T, N}, "(B, T, N)");
    check_shape(kMamba2Op, "c", c_in, {B, T, N}, "(B, T, N)");
    const std::vector<int64_t> state_shape{B, H, x_in.size(3), N};
    check_recurrence(kMamba2Op, options, B, T, state_shape, "(B, H, P, N)");
    const auto type = compute_type(x_in.scalar_type());
    dt = without_padding(cast(dt_in, type), options.seq_start);
    x = without_padding(x_in, options.seq_start);
    log_decay = with_resets(dt * cast(a, type), options);
    b = without_padding(b_in, options.seq_start);
    c = without_padding(c_in, options.seq_start);
    d = cast(d_in, type);
    first = initial_state(options, state_shape, dt);
  }
};

/// One token: the state after it, and what it reads.
RecurrenceResult mamba2_step(const Mamba2Inputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return cast(x.select(1, t), state.scalar_type()); };
  const auto x = at_t(in.x);
  const auto written = (x * at_t(in.dt).unsqueeze(-1)).unsqueeze(-1) * at_t(in.b).unsqueeze(1).unsqueeze(1);
  const auto next = at_t(in.log_decay).exp().unsqueeze(-1).unsqueeze(-1) * state + written;
  const auto read = at::matmul(next, at_t(in.c).unsqueeze(1).unsqueeze(-1)).squeeze(-1);
  return {read + in.d.unsqueeze(-1) * x, next};
}

/// Sums of log decays within a chunk, each of its own and not a difference of prefix sums: nothing cancels, and -inf, a
/// reset, stays what it is. Blocks of one token are merged pairwise: what lies between a token of the second block of a
/// pair and one of the first is the second's `prefix` and the first's `suffix`.
struct Sums {
  at::Tensor between;         // (..., C, C), row i column j: of j + 1 ... i; -inf above the diagonal
  at::Tensor prefix, suffix;  // (..., C): from the chunk's start through i; of i + 1 through the chunk's end
};

Sums sums_within_chunk(const at::Tensor& log_decay) {
  const int64_t chunk = log_decay.size(-1);
  Sums sums{at::zeros_like(log_decay).unsqueeze(-1).unsqueeze(-1), log_decay, at::zeros_like(log_decay)};
  for (int64_t half = 1; half < chunk; half *= 2) {
    const auto pairs = [&](const at::Tensor& x) { return x.unflatten(-1, {chunk / (2 * half), 2, half}).unbind(-2); };
    const auto prefix = pairs(sums.prefix), suffix = pairs(sums.suffix);
    const auto own = sums.between.unflatten(-3, {chunk / (2 * half), 2}).unbind(-3);
    const auto across = prefix[1].unsqueeze(-1) + suffix[0].unsqueeze(-2);
    const auto future = at::full_like(own[0], -std::numeric_limits<double>::infinity());
    sums.between = at::cat({at::cat({own[0], future}, -1), at::cat({across, own[1]}, -1)}, -2);
    const auto total = [&](const at::Tensor& x) { return x.narrow(-1, half - 1, 1); };
    const auto merged = [](const at::Tensor& a, const at::Tensor& b) { return at::cat({a, b}, -1).flatten(-2, -1); };
    sums.suffix = merged(suffix[0] + total(prefix[1]), suffix[1]);
    sums.prefix = merged(prefix[0], prefix[1] + total(prefix[0]));
  }
  sums.between = sums.between.squeeze(-3);
  return sums;
}

/// (B, T, ...) → (B, n, C, ...), the last chunk filled up with 0: time stays where it is, unlike in to_chunks.
at::Tensor in_chunks(const at::Tensor& x, int64_t chunk) {
  const int64_t missing = (chunk - x.size(1) % chunk) % chunk;
  if (missing == 0) return x.unflatten(1, {-1, chunk});
  auto shape = x.sizes().vec();
  shape[1] = missing;
  return at::cat({x, at::zeros(shape, x.options().requires_grad(false))}, 1).unflatten(1, {-1, chunk});
}

/// x, dt, log_decay, b, c; d. Heads share b and c, so all heads' states of a chunk are read and written as one matrix
/// (N, H P): two large products a chunk instead of two small ones a head. For devices and dtypes that have no kernel.
RecurrenceResult run_mamba2(at::TensorList inputs, const at::Tensor& state_BHPN, int64_t chunk_size) {
  const int64_t length = inputs[0].size(1), heads = inputs[0].size(2);
  const auto chunk = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::min(chunk_size, length))));
  const auto in = [&](size_t i) { return cast(inputs[i], state_BHPN.scalar_type()); };
  const auto x_BTHP = in(0), d = in(5);
  const auto dx_BnCHP = in_chunks(x_BTHP * in(1).unsqueeze(-1), chunk);
  const auto b_BnCN = in_chunks(in(3), chunk), c_BnCN = in_chunks(in(4), chunk);
  const auto sums = sums_within_chunk(in_chunks(in(2), chunk).transpose(-1, -2));  // (B, n, H, C)
  const auto of_tokens = [](const at::Tensor& x_BnHC) { return x_BnHC.exp().transpose(-1, -2).unsqueeze(-1); };
  const auto prefix_BnCH1 = of_tokens(sums.prefix);  // from the state before the chunk
  const auto added = at::matmul(b_BnCN.transpose(-1, -2), (dx_BnCHP * of_tokens(sums.suffix)).flatten(-2));
  const auto passes = prefix_BnCH1.select(2, chunk - 1).expand({-1, -1, -1, inputs[0].size(3)}).flatten(-2);
  const auto states = scan_chunks(passes.unsqueeze(1).unsqueeze(3), added.unsqueeze(1),
                                  state_BHPN.permute({0, 3, 1, 2}).flatten(-2).unsqueeze(1));
  const auto read = at::matmul(c_BnCN, states.before_BHnKV.squeeze(1)).unflatten(-1, {heads, -1}) * prefix_BnCH1;
  const auto weights = at::matmul(c_BnCN, b_BnCN.transpose(-1, -2)).unsqueeze(2) * sums.between.exp();
  const auto y = read + at::matmul(weights, dx_BnCHP.transpose(2, 3)).transpose(2, 3);
  return {y.flatten(1, 2).narrow(1, 0, length) + d.unsqueeze(-1) * x_BTHP,
          states.last_BHKV.squeeze(1).unflatten(-1, {heads, -1}).permute({0, 2, 3, 1}).contiguous()};
}

/// A decay for every pair of tokens, of all heads.
int64_t mamba2_chunk_numbers(at::TensorList inputs, int64_t chunk) {
  return inputs[0].size(0) * inputs[0].size(2) * chunk * chunk;
}

/// The tensors as the CPU kernel reads them; they must outlive its parameters.
struct Mamba2KernelInputs {
  at::Tensor x, dt, log_decay, b, c, d, first;

  Mamba2KernelInputs(at::TensorList inputs, const at::Tensor& first_in) : first(first_in.contiguous()) {
    const auto rows = [&](const at::Tensor& t) { return packed_rows(t, first.scalar_type()); };
    x = rows(inputs[0]), dt = rows(inputs[1].unsqueeze(-1)), log_decay = rows(inputs[2].unsqueeze(-1));
    b = rows(inputs[3].unsqueeze(2)), c = rows(inputs[4].unsqueeze(2));
    d = cast(inputs[5], first.scalar_type()).contiguous();
  }
  template <class T>
  kernels::Mamba2Params<T> params() const {
    return {.x = head_rows<T>(x),
            .dt = head_rows<T>(dt),
            .log_decay = head_rows<T>(log_decay),
            .b = head_rows<T>(b),
            .c = head_rows<T>(c),
            .d = d.const_data_ptr<T>(),
            .first = first.const_data_ptr<T>(),
            .batch = x.size(0),
            .length = x.size(1),
            .heads = x.size(2),
            .width = x.size(3),
            .states = b.size(3)};
  }
};

ScanResult mamba2_forward_cpu(at::TensorList inputs, const at::Tensor& first, int64_t) {
  const Mamba2KernelInputs in(inputs, first);
  const auto y = at::empty(in.x.sizes(), in.x.options()), last = at::empty_like(in.first);
  const auto kept = room_for_states(kernels::kept_states(kernels::chunks_of(in.x.size(1))), in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::mamba2(in.params<T>(), mutable_head_rows<T>(y), last.mutable_data_ptr<T>(), kept.mutable_data_ptr<T>());
  });
  return {cast(y, inputs[0].scalar_type()), last, kept};
}

ScanGradients mamba2_backward_cpu(const at::Tensor& dy, const at::Tensor& dlast, at::TensorList inputs,
                                  const at::Tensor& first, const at::Tensor& kept, int64_t) {
  const Mamba2KernelInputs in(inputs, first);
  const auto grad = packed_rows(dy, first.scalar_type()), grad_last = dlast.contiguous();
  const auto dx = room_for_gradient(in.x), ddt = room_for_gradient(in.dt), dlog_decay = room_for_gradient(in.log_decay);
  auto of_tasks = in.b.sizes().vec();  // (B, T, tasks, N)
  of_tasks[2] = kernels::mamba2_tasks(in.x.size(0), in.x.size(2));
  const auto db = at::empty(of_tasks, in.b.options()), dc = at::empty(of_tasks, in.c.options());
  const auto dd = at::empty({in.x.size(0), in.x.size(2)}, in.d.options()), dfirst = at::empty_like(in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::mamba2_backward(in.params<T>(), kept.const_data_ptr<T>(),
                             kernels::Mamba2Gradients<T>{.dy = head_rows<T>(grad),
                                                         .dlast = grad_last.const_data_ptr<T>(),
                                                         .dx = mutable_head_rows<T>(dx),
                                                         .ddt = mutable_head_rows<T>(ddt),
                                                         .dlog_decay = mutable_head_rows<T>(dlog_decay),
                                                         .db = mutable_head_rows<T>(db),
                                                         .dc = mutable_head_rows<T>(dc),
                                                         .dd = dd.mutable_data_ptr<T>(),
                                                         .dfirst = dfirst.mutable_data_ptr<T>()});
  });
  const auto as_input = [&](const at::Tensor& t, size_t i) { return cast(t, inputs[i].scalar_type()); };
  return {{as_input(dx, 0), as_input(ddt.squeeze(-1), 1), as_input(dlog_decay.squeeze(-1), 2), as_input(db.sum(2), 3),
           as_input(dc.sum(2), 4), as_input(dd.sum(0), 5)},
          dfirst};
}

TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("mamba2_scan", mamba2_forward_cpu);
  m.impl("mamba2_scan_backward", mamba2_backward_cpu);
}

}  // namespace

constinit const ScanOp kMamba2Scan{.name = kMamba2Op,
                                   .scan = "fox::mamba2_scan",
                                   .backward = "fox::mamba2_scan_backward",
                                   .in_time = 5,
                                   .values = 0,
                                   .chunk_numbers = mamba2_chunk_numbers,
                                   .run = run_mamba2};

RecurrenceResult mamba2(const at::Tensor& x_BTHP, const at::Tensor& dt_BTH, const at::Tensor& a_H,
                        const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_H,
                        const RecurrenceOptions& options) {
  const Mamba2Inputs in(x_BTHP, dt_BTH, a_H, b_BTN, c_BTN, d_H, options);
  if (has_scan(x_BTHP)) {
    return scan(kMamba2Scan, {in.x, in.dt, in.log_decay, in.b, in.c, in.d}, in.first, options.chunk_size);
  }
  const auto result = mamba2_step(in, 0, in.first);
  return {cast(result.o.unsqueeze(1), x_BTHP.scalar_type()), result.state};
}

RecurrenceResult mamba2_reference(const at::Tensor& x_BTHP, const at::Tensor& dt_BTH, const at::Tensor& a_H,
                                  const at::Tensor& b_BTN, const at::Tensor& c_BTN, const at::Tensor& d_H,
                                  const RecurrenceOptions& options) {
  const Mamba2Inputs in(x_BTHP, dt_BTH, a_H, b_BTN, c_BTN, d_H, options);
  std::vector<at::Tensor> y;
  auto state = in.first;
  for (int64_t t = 0; t < in.x.size(1); ++t) {
    const auto result = mamba2_step(in, t, state);
    y.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(y, 1), x_BTHP.scalar_type()), state};
}

// mamba2() as an operator of the dispatcher, for callers from Python: a composition, differentiable as its parts are.
TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(recurrence_schema(kMamba2Op, "Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor d").c_str(),
        [](const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a, const at::Tensor& b, const at::Tensor& c,
           const at::Tensor& d, const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens,
           const OptionalTensor& seq_start, int64_t chunk_size) {
          const auto result =
              mamba2(x, dt, a, b, c, d, recurrence_options(initial_state, cu_seqlens, seq_start, chunk_size));
          return std::make_tuple(result.o, result.state);
        });
}

}  // namespace fox::ops
