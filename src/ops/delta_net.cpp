#include "ops/delta_net.h"

#include <cmath>

#include "kernels/cpu/delta_net.h"
#include "ops/common.h"
#include "ops/scan_cpu.h"

namespace fox::ops {
namespace {

constexpr const char* kDeltaNetOp = "delta_net";

/// The inputs, checked, padding set to 0: it writes nothing.
struct DeltaNetInputs {
  at::Tensor q, k, v, beta, first;
  at::Tensor starts_1T;  // whether a document starts at the token; (1, 0) when there is one

  DeltaNetInputs(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& beta_in,
                 const RecurrenceOptions& options) {
    for (const auto* x : {&q_in, &k_in, &v_in, &beta_in}) check_floating(kDeltaNetOp, "an input", *x);
    check_dim(kDeltaNetOp, "q", q_in, 4, "(B, T, H, K)");
    check_dim(kDeltaNetOp, "v", v_in, 4, "(B, T, H, V)");
    const int64_t B = q_in.size(0), T = q_in.size(1), H = q_in.size(2);
    check_shape(kDeltaNetOp, "k", k_in, q_in.sizes(), "(B, T, H, K)");
    check_shape(kDeltaNetOp, "v", v_in, {B, T, H, v_in.size(3)}, "(B, T, H, V)");
    check_shape(kDeltaNetOp, "beta", beta_in, {B, T, H}, "(B, T, H)");
    const std::vector<int64_t> state_shape{B, H, q_in.size(3), v_in.size(3)};
    check_recurrence(kDeltaNetOp, options, B, T, state_shape, "(B, H, K, V)");
    q = without_padding(q_in, options.seq_start);
    k = without_padding(k_in, options.seq_start);
    v = without_padding(v_in, options.seq_start);
    beta = without_padding(cast(beta_in, compute_type(q_in.scalar_type())), options.seq_start);
    first = initial_state(options, state_shape, beta);
    starts_1T = starts_or_empty(options, q);
  }
};

/// One token that sees `state`: the state after it, and what it reads.
RecurrenceResult delta_net_step(const DeltaNetInputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return cast(x.select(1, t), state.scalar_type()); };
  const auto k = at_t(in.k).unsqueeze(-2);
  const auto written = (at_t(in.v).unsqueeze(-2) - at::matmul(k, state)) * at_t(in.beta).unsqueeze(-1).unsqueeze(-1);
  const auto next = state + k.transpose(-1, -2) * written;
  return {at::matmul((at_t(in.q) * score_scale(in.q)).unsqueeze(-2), next).squeeze(-2), next};
}

/// Which tokens of a chunk share a document with which, with the state before the chunk and with the one behind it, as
/// numbers 0 and 1 to multiply with. Undefined when there is one document.
struct Documents {
  at::Tensor same_nCC, enters_nC1, leaves_nC1, passes_n11;

  /// starts_1T: of the piece; tokens before its first start belong to the document of the state before it.
  Documents(const at::Tensor& starts_1T, int64_t chunk, at::ScalarType type) {
    if (starts_1T.size(1) == 0) return;
    const auto document_T = starts_1T[0].cumsum(0);
    const int64_t length = document_T.size(0), filled = (length + chunk - 1) / chunk * chunk;
    // What fills up the last chunk belongs to the last document, whose state goes on.
    const auto last = document_T.narrow(0, length - 1, 1).expand({filled - length});
    const auto d_nC = at::cat({document_T, last}).view({-1, chunk});
    const auto before_n1 =
        at::cat({at::zeros_like(d_nC[0].narrow(0, 0, 1)), d_nC.select(1, chunk - 1).narrow(0, 0, d_nC.size(0) - 1)})
            .unsqueeze(1);
    const auto behind_n1 = d_nC.narrow(1, chunk - 1, 1);
    same_nCC = (d_nC.unsqueeze(2) == d_nC.unsqueeze(1)).to(type);
    enters_nC1 = (d_nC == before_n1).to(type).unsqueeze(2);
    leaves_nC1 = (d_nC == behind_n1).to(type).unsqueeze(2);
    passes_n11 = (before_n1 == behind_n1).to(type).unsqueeze(2);
  }
};

at::Tensor times(const at::Tensor& x, const at::Tensor& mask) { return mask.defined() ? x * mask : x; }

/// q, k, v, beta, starts_1T, in ATen calls for devices and dtypes that have no kernel.
RecurrenceResult run_delta_net(at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
  const int64_t length = inputs[0].size(1), chunk = std::min(chunk_size, length), key_size = inputs[0].size(3);
  const Documents documents(inputs[4], chunk, first.scalar_type());
  const auto chunks = [&](size_t i) { return to_chunks(cast(inputs[i], first.scalar_type()), chunk); };
  const auto q = chunks(0) * score_scale(inputs[0]), k = chunks(1), v = chunks(2);
  const auto beta = chunks(3).unsqueeze(-1);
  // Token i writes w_i = beta_i (v_i - Sᵀ k_i - Σ_{j<i} (k_i·k_j) w_j), S the state before the chunk: a unit lower
  // triangular system, solved for all chunks at once, with S left to be filled in.
  const auto k_beta = k * beta;
  const auto system = times(at::matmul(k_beta, k.transpose(-1, -2)), documents.same_nCC).tril(-1);
  const auto solved = at::linalg_solve_triangular(system, at::cat({times(k_beta, documents.enters_nC1), v * beta}, -1),
                                                  /*upper=*/false, /*left=*/true,
                                                  /*unitriangular=*/true);
  const auto through_state = solved.narrow(-1, 0, key_size).unbind(2);
  const auto own = solved.narrow(-1, key_size, v.size(-1)).unbind(2);
  const auto k_out = times(k, documents.leaves_nC1).transpose(-1, -2).unbind(2);
  std::vector<at::Tensor> before, written;
  auto state = first;
  for (size_t i = 0; i < own.size(); ++i) {
    before.push_back(state);
    written.push_back(own[i] - at::matmul(through_state[i], state));
    const auto kept = documents.passes_n11.defined() ? state * documents.passes_n11[static_cast<int64_t>(i)] : state;
    state = kept + at::matmul(k_out[i], written.back());
  }
  const auto weights = times(at::matmul(q, k.transpose(-1, -2)), documents.same_nCC).tril();
  const auto o =
      at::matmul(times(q, documents.enters_nC1), at::stack(before, 2)) + at::matmul(weights, at::stack(written, 2));
  return {from_chunks(o, length), state};
}

/// Both right sides of the triangular systems, of all heads.
int64_t delta_net_chunk_numbers(at::TensorList inputs, int64_t chunk) {
  return inputs[0].size(0) * inputs[0].size(2) * chunk * (inputs[0].size(3) + inputs[2].size(3));
}

/// The tensors as the CPU kernel reads them; they must outlive its parameters.
struct DeltaNetKernelInputs {
  at::Tensor q, k, v, beta, starts, first;

  DeltaNetKernelInputs(at::TensorList inputs, const at::Tensor& first_in) : first(first_in.contiguous()) {
    const auto rows = [&](const at::Tensor& x) { return packed_rows(x, first.scalar_type()); };
    q = rows(inputs[0]), k = rows(inputs[1]), v = rows(inputs[2]), beta = rows(inputs[3].unsqueeze(-1));
    starts = inputs[4].contiguous();
  }
  const bool* starts_or_null() const { return starts.size(1) > 0 ? starts.const_data_ptr<bool>() : nullptr; }
  template <class T>
  kernels::DeltaNetParams<T> params() const {
    return {.q = head_rows<T>(q),
            .k = head_rows<T>(k),
            .v = head_rows<T>(v),
            .beta = head_rows<T>(beta),
            .starts = starts_or_null(),
            .first = first.const_data_ptr<T>(),
            .batch = q.size(0),
            .length = q.size(1),
            .heads = q.size(2),
            .keys = q.size(3),
            .values = v.size(3),
            .scale = static_cast<T>(score_scale(q))};
  }
};

ScanResult delta_net_forward_cpu(at::TensorList inputs, const at::Tensor& first, int64_t) {
  const DeltaNetKernelInputs in(inputs, first);
  const auto o = at::empty(in.v.sizes(), in.v.options()), last = at::empty_like(in.first);
  const auto kept = room_for_states(kernels::delta_net_kept(in.q.size(1), in.starts_or_null()), in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::delta_net(in.params<T>(), mutable_head_rows<T>(o), last.mutable_data_ptr<T>(), kept.mutable_data_ptr<T>());
  });
  return {cast(o, inputs[2].scalar_type()), last, kept};
}

ScanGradients delta_net_backward_cpu(const at::Tensor& d_o, const at::Tensor& dlast, at::TensorList inputs,
                                     const at::Tensor& first, const at::Tensor& kept, int64_t) {
  const DeltaNetKernelInputs in(inputs, first);
  const auto grad = packed_rows(d_o, first.scalar_type()), grad_last = dlast.contiguous();
  const auto dq = room_for_gradient(in.q), dk = room_for_gradient(in.k), dv = room_for_gradient(in.v);
  const auto dbeta = room_for_gradient(in.beta), dfirst = at::empty_like(in.first);
  dispatch_real(first.scalar_type(), [&]<class T>() {
    kernels::delta_net_backward(in.params<T>(), kept.const_data_ptr<T>(),
                                kernels::DeltaNetGradients<T>{.d_o = head_rows<T>(grad),
                                                              .dlast = grad_last.const_data_ptr<T>(),
                                                              .dq = mutable_head_rows<T>(dq),
                                                              .dk = mutable_head_rows<T>(dk),
                                                              .dv = mutable_head_rows<T>(dv),
                                                              .dbeta = mutable_head_rows<T>(dbeta),
                                                              .dfirst = dfirst.mutable_data_ptr<T>()});
  });
  const auto as_input = [&](const at::Tensor& x, size_t i) { return cast(x, inputs[i].scalar_type()); };
  return {
      {as_input(dq, 0), as_input(dk, 1), as_input(dv, 2), as_input(dbeta.squeeze(-1), 3), at::empty_like(inputs[4])},
      dfirst};
}

TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("delta_net_scan", delta_net_forward_cpu);
  m.impl("delta_net_scan_backward", delta_net_backward_cpu);
}

}  // namespace

constinit const ScanOp kDeltaNetScan{.name = kDeltaNetOp,
                                     .scan = "fox::delta_net_scan",
                                     .backward = "fox::delta_net_scan_backward",
                                     .in_time = 5,
                                     .values = 2,
                                     .chunk_numbers = delta_net_chunk_numbers,
                                     .run = run_delta_net};

RecurrenceResult delta_net(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                           const at::Tensor& beta_BTH, const RecurrenceOptions& options) {
  const DeltaNetInputs in(q_BTHK, k_BTHK, v_BTHV, beta_BTH, options);
  if (has_scan(q_BTHK)) {
    return scan(kDeltaNetScan, {in.q, in.k, in.v, in.beta, in.starts_1T}, in.first, options.chunk_size);
  }
  const auto result = delta_net_step(in, 0, in.first);
  return {cast(result.o.unsqueeze(1), v_BTHV.scalar_type()), result.state};
}

RecurrenceResult delta_net_reference(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                                     const at::Tensor& beta_BTH, const RecurrenceOptions& options) {
  const DeltaNetInputs in(q_BTHK, k_BTHK, v_BTHV, beta_BTH, options);
  std::vector<at::Tensor> o;
  auto state = in.first;
  for (int64_t t = 0; t < in.q.size(1); ++t) {
    const bool starts = in.starts_1T.size(1) > 0 && in.starts_1T[0][t].item<bool>();
    const auto result = delta_net_step(in, t, starts ? at::zeros_like(state) : state);
    o.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(o, 1), v_BTHV.scalar_type()), state};
}

// delta_net() as an operator of the dispatcher, for callers from Python: a composition, differentiable as its parts
// are.
TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def(recurrence_schema(kDeltaNetOp, "Tensor q, Tensor k, Tensor v, Tensor beta").c_str(),
        [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& beta,
           const OptionalTensor& initial_state, const OptionalTensor& cu_seqlens, const OptionalTensor& seq_start,
           int64_t chunk_size) {
          const auto result =
              delta_net(q, k, v, beta, recurrence_options(initial_state, cu_seqlens, seq_start, chunk_size));
          return std::make_tuple(result.o, result.state);
        });
}

}  // namespace fox::ops
