#include "ops/delta_net.h"

#include <cmath>

#include "ops/common.h"

namespace fox::ops {
namespace {

constexpr const char* kOp = "delta_net";

/// The inputs in the dtype of the computation, padding set to 0: it writes nothing.
struct Inputs {
  at::Tensor q, k, v, beta, first;
  at::Tensor document_T;  // number of each token's document, or undefined

  Inputs(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& beta_in,
         const RecurrenceOptions& options) {
    for (const auto* x : {&q_in, &k_in, &v_in, &beta_in}) check_floating(kOp, "an input", *x);
    check_dim(kOp, "q", q_in, 4, "(B, T, H, K)");
    check_dim(kOp, "v", v_in, 4, "(B, T, H, V)");
    const int64_t B = q_in.size(0), T = q_in.size(1), H = q_in.size(2);
    check_shape(kOp, "k", k_in, q_in.sizes(), "(B, T, H, K)");
    check_shape(kOp, "v", v_in, {B, T, H, v_in.size(3)}, "(B, T, H, V)");
    check_shape(kOp, "beta", beta_in, {B, T, H}, "(B, T, H)");
    const std::vector<int64_t> state_shape{B, H, q_in.size(3), v_in.size(3)};
    check_recurrence(kOp, options, B, T, state_shape, "(B, H, K, V)");
    const auto type = compute_type(q_in.scalar_type());
    q = without_padding(cast(q_in, type), options.seq_start) * (1 / std::sqrt(static_cast<double>(q_in.size(3))));
    k = without_padding(cast(k_in, type), options.seq_start);
    v = without_padding(cast(v_in, type), options.seq_start);
    beta = without_padding(cast(beta_in, type), options.seq_start);
    first = initial_state(options, state_shape, q);
    if (options.cu_seqlens) document_T = document_numbers(options.cu_seqlens->to(q.device()), T);
  }
};

/// One token that sees `state`: the state after it, and what it reads.
RecurrenceResult step(const Inputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return x.select(1, t); };
  const auto k = at_t(in.k).unsqueeze(-2);
  const auto written = (at_t(in.v).unsqueeze(-2) - at::matmul(k, state)) * at_t(in.beta).unsqueeze(-1).unsqueeze(-1);
  const auto next = state + k.transpose(-1, -2) * written;
  return {at::matmul(at_t(in.q).unsqueeze(-2), next).squeeze(-2), next};
}

/// Which tokens of a chunk share a document with which, with the state before the chunk and with the one behind it, as
/// numbers 0 and 1 to multiply with. Undefined when there is one document.
struct Documents {
  at::Tensor same_nCC, enters_nC1, leaves_nC1, passes_n11;

  Documents(const at::Tensor& document_T, int64_t chunk, at::ScalarType type) {
    if (!document_T.defined()) return;
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

RecurrenceResult chunked(const Inputs& in, int64_t chunk_size) {
  const int64_t length = in.q.size(1), chunk = std::min(chunk_size, length), key_size = in.q.size(3);
  const Documents documents(in.document_T, chunk, in.q.scalar_type());
  const auto q = to_chunks(in.q, chunk), k = to_chunks(in.k, chunk), v = to_chunks(in.v, chunk);
  const auto beta = to_chunks(in.beta, chunk).unsqueeze(-1);
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
  auto state = in.first;
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

}  // namespace

RecurrenceResult delta_net(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                           const at::Tensor& beta_BTH, const RecurrenceOptions& options) {
  const Inputs in(q_BTHK, k_BTHK, v_BTHV, beta_BTH, options);
  if (q_BTHK.size(1) > 1) {
    const auto result = chunked(in, options.chunk_size);
    return {cast(result.o, v_BTHV.scalar_type()), result.state};
  }
  const auto result = step(in, 0, in.first);
  return {cast(result.o.unsqueeze(1), v_BTHV.scalar_type()), result.state};
}

RecurrenceResult delta_net_reference(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                                     const at::Tensor& beta_BTH, const RecurrenceOptions& options) {
  const Inputs in(q_BTHK, k_BTHK, v_BTHV, beta_BTH, options);
  std::vector<at::Tensor> o;
  auto state = in.first;
  for (int64_t t = 0; t < in.q.size(1); ++t) {
    const bool starts = t > 0 && in.document_T.defined() && !at::equal(in.document_T[t], in.document_T[t - 1]);
    const auto result = step(in, t, starts ? at::zeros_like(state) : state);
    o.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(o, 1), v_BTHV.scalar_type()), state};
}

}  // namespace fox::ops
