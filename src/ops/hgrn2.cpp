#include "ops/hgrn2.h"

#include <bit>
#include <cmath>

#include "kernels/cpu/hgrn2.h"
#include "ops/common.h"
#include "ops/scan_cpu.h"

namespace fox::ops {
namespace {

constexpr const char* kHgrn2Op = "hgrn2";

/// The inputs, checked, with padding and document starts written into them.
struct Hgrn2Inputs {
  at::Tensor q, k, v, log_g, first;

  Hgrn2Inputs(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& log_g_in,
              const RecurrenceOptions& options) {
    for (const auto* x : {&q_in, &k_in, &v_in, &log_g_in}) check_floating(kHgrn2Op, "an input", *x);
    check_dim(kHgrn2Op, "q", q_in, 4, "(B, T, H, K)");
    check_dim(kHgrn2Op, "v", v_in, 4, "(B, T, H, V)");
    check_shape(kHgrn2Op, "k", k_in, q_in.sizes(), "(B, T, H, K)");
    check_shape(kHgrn2Op, "log_g", log_g_in, q_in.sizes(), "(B, T, H, K)");
    check_shape(kHgrn2Op, "v", v_in, {q_in.size(0), q_in.size(1), q_in.size(2), v_in.size(3)}, "(B, T, H, V)");
    const std::vector<int64_t> state_shape{q_in.size(0), q_in.size(2), q_in.size(3), v_in.size(3)};
    check_recurrence(kHgrn2Op, options, q_in.size(0), q_in.size(1), state_shape, "(B, H, K, V)");
    const auto type = compute_type(q_in.scalar_type());
    q = without_padding(q_in, options.seq_start);
    k = without_padding(k_in, options.seq_start);
    v = without_padding(v_in, options.seq_start);
    log_g = with_resets(cast(log_g_in, type), options);
    first = initial_state(options, state_shape, log_g);
  }
};

/// One token: the state after it, and what it reads.
RecurrenceResult hgrn2_step(const Hgrn2Inputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return cast(x.select(1, t), state.scalar_type()); };
  const auto next = at_t(in.log_g).exp().unsqueeze(-1) * state + at_t(in.k).unsqueeze(-1) * at_t(in.v).unsqueeze(-2);
  return {at::matmul((at_t(in.q) * score_scale(in.q)).unsqueeze(-2), next).squeeze(-2), next};
}

/// What holds within a chunk. Blocks of one token are merged pairwise until one block is the whole chunk: a query of
/// the second block of a pair sees a key of the first through the gates from the second's start to the query (its
/// `prefix`) and those behind the key to the first's end (its `suffix`).
struct WithinChunk {
  at::Tensor weights;  // (..., C, C), row i column j: q_i·k_j times the gates of j + 1 ... i
  at::Tensor prefix;   // (..., C, K): log gates from the chunk's start through i
  at::Tensor suffix;   // (..., C, K): log gates from i + 1 through the chunk's end
};

WithinChunk within_chunk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& log_g) {
  const int64_t chunk = q.size(-2);
  WithinChunk result{(q * k).sum(-1).unsqueeze(-1).unsqueeze(-1), log_g, at::zeros_like(log_g)};
  for (int64_t half = 1; half < chunk; half *= 2) {
    const auto pairs = [&](const at::Tensor& x) { return x.unflatten(-2, {chunk / (2 * half), 2, half}).unbind(-3); };
    const auto qs = pairs(q), ks = pairs(k), prefix = pairs(result.prefix), suffix = pairs(result.suffix);
    const auto across = at::matmul(qs[1] * prefix[1].exp(), (ks[0] * suffix[0].exp()).transpose(-1, -2));
    const auto own = result.weights.unflatten(-3, {chunk / (2 * half), 2}).unbind(-3);
    result.weights = at::cat({at::cat({own[0], at::zeros_like(own[0])}, -1), at::cat({across, own[1]}, -1)}, -2);
    const auto total = [&](const at::Tensor& sums) { return sums.narrow(-2, half - 1, 1); };
    const auto merged = [](const at::Tensor& a, const at::Tensor& b) { return at::cat({a, b}, -2).flatten(-3, -2); };
    result.suffix = merged(suffix[0] + total(prefix[1]), suffix[1]);
    result.prefix = merged(prefix[0], prefix[1] + total(prefix[0]));
  }
  result.weights = result.weights.squeeze(-3);
  return result;
}

/// q, k, v, log_g, in ATen calls for devices and dtypes that have no kernel.
RecurrenceResult run_hgrn2(at::TensorList inputs, const at::Tensor& state, int64_t chunk_size) {
  const int64_t length = inputs[0].size(1);
  const auto chunk = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::min(chunk_size, length))));
  const auto chunks = [&](size_t i) { return to_chunks(cast(inputs[i], state.scalar_type()), chunk); };
  const auto q = chunks(0) * score_scale(inputs[0]), k = chunks(1), v = chunks(2);
  const auto within = within_chunk(q, k, chunks(3));
  const auto added = at::matmul((k * within.suffix.exp()).transpose(-1, -2), v);
  const auto decay = within.prefix.select(-2, chunk - 1).exp().unsqueeze(-1);
  const auto states = scan_chunks(decay, added, state);
  const auto o = at::matmul(within.weights, v) + at::matmul(q * within.prefix.exp(), states.before_BHnKV);
  return {from_chunks(o, length), states.last_BHKV};
}

/// q with the gates of a level, of all heads.
int64_t hgrn2_chunk_numbers(at::TensorList inputs, int64_t chunk) {
  return inputs[0].size(0) * inputs[0].size(2) * chunk * inputs[0].size(3);
}

/// The tensors as the CPU kernel reads them; they must outlive its parameters.
struct Hgrn2KernelInputs {
  at::Tensor q, k, v, log_g, first;

  Hgrn2KernelInputs(at::TensorList inputs, const at::Tensor& first_in) : first(first_in.contiguous()) {
    const auto rows = [&](size_t i) { return packed_rows(inputs[i], first.scalar_type()); };
    q = rows(0), k = rows(1), v = rows(2), log_g = rows(3);
  }
  template <class T>
  kernels::Hgrn2Params<T> params() const {
    return {.q = head_rows<T>(q),
            .k = head_rows<T>(k),
            .log_g = head_rows<T>(log_g),
            .v = head_rows<T>(v),
            .first = first.const_data_ptr<T>(),
            .batch = q.size(0),
            .length = q.size(1),
            .heads = q.size(2),
            .keys = q.size(3),
            .values = v.size(3),
            .scale = static_cast<T>(score_scale(q))};
  }
};

ScanResult hgrn2_forward_cpu(at::TensorList inputs, const at::Tensor& first, int64_t) {
  const Hgrn2KernelInputs in(inputs, first);
  const auto o = at::empty(in.v.sizes(), in.v.options()), last = at::empty_like(in.first);
  const auto kept = room_for_states(kernels::kept_states(kernels::chunks_of(in.q.size(1))), in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::hgrn2(in.params<T>(), mutable_head_rows<T>(o), last.mutable_data_ptr<T>(), kept.mutable_data_ptr<T>());
  });
  return {cast(o, inputs[2].scalar_type()), last, kept};
}

ScanGradients hgrn2_backward_cpu(const at::Tensor& d_o, const at::Tensor& dlast, at::TensorList inputs,
                                 const at::Tensor& first, const at::Tensor& kept, int64_t) {
  const Hgrn2KernelInputs in(inputs, first);
  const auto grad = packed_rows(d_o, first.scalar_type()), grad_last = dlast.contiguous();
  const auto dq = room_for_gradient(in.q), dk = room_for_gradient(in.k), dv = room_for_gradient(in.v),
             dlog_g = room_for_gradient(in.log_g);
  const auto dfirst = at::empty_like(in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::hgrn2_backward(in.params<T>(), kept.const_data_ptr<T>(),
                            kernels::Hgrn2Gradients<T>{.d_o = head_rows<T>(grad),
                                                       .dlast = grad_last.const_data_ptr<T>(),
                                                       .dq = mutable_head_rows<T>(dq),
                                                       .dk = mutable_head_rows<T>(dk),
                                                       .dlog_g = mutable_head_rows<T>(dlog_g),
                                                       .dv = mutable_head_rows<T>(dv),
                                                       .dfirst = dfirst.mutable_data_ptr<T>()});
  });
  const auto as_input = [&](const at::Tensor& x, size_t i) { return cast(x, inputs[i].scalar_type()); };
  return {{as_input(dq, 0), as_input(dk, 1), as_input(dv, 2), as_input(dlog_g, 3)}, dfirst};
}

TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("hgrn2_scan", hgrn2_forward_cpu);
  m.impl("hgrn2_scan_backward", hgrn2_backward_cpu);
}

}  // namespace

constinit const ScanOp kHgrn2Scan{.name = kHgrn2Op,
                                  .scan = "fox::hgrn2_scan",
                                  .backward = "fox::hgrn2_scan_backward",
                                  .in_time = 4,
                                  .values = 2,
                                  .chunk_numbers = hgrn2_chunk_numbers,
                                  .run = run_hgrn2};

RecurrenceResult hgrn2(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                       const at::Tensor& log_g_BTHK, const RecurrenceOptions& options) {
  const Hgrn2Inputs in(q_BTHK, k_BTHK, v_BTHV, log_g_BTHK, options);
  if (has_scan(q_BTHK)) return scan(kHgrn2Scan, {in.q, in.k, in.v, in.log_g}, in.first, options.chunk_size);
  const auto result = hgrn2_step(in, 0, in.first);
  return {cast(result.o.unsqueeze(1), v_BTHV.scalar_type()), result.state};
}

RecurrenceResult hgrn2_reference(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                                 const at::Tensor& log_g_BTHK, const RecurrenceOptions& options) {
  const Hgrn2Inputs in(q_BTHK, k_BTHK, v_BTHV, log_g_BTHK, options);
  std::vector<at::Tensor> o;
  auto state = in.first;
  for (int64_t t = 0; t < in.q.size(1); ++t) {
    const auto result = hgrn2_step(in, t, state);
    o.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(o, 1), v_BTHV.scalar_type()), state};
}

// hgrn2() as an operator of the dispatcher, for callers from Python: a composition, differentiable as its parts are.
TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(recurrence_schema(kHgrn2Op, "Tensor q, Tensor k, Tensor v, Tensor log_g").c_str(),
        [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& log_g,
           const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start,
           int64_t chunk_size) {
          const auto result =
              hgrn2(q, k, v, log_g, recurrence_options(initial_state, cu_seqlens, seq_start, chunk_size));
          return std::make_tuple(result.o, result.state);
        });
}

}  // namespace fox::ops
