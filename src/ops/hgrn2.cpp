#include "ops/hgrn2.h"

#include <bit>
#include <cmath>

#include "ops/common.h"

namespace fox::ops {
namespace {

constexpr const char* kOp = "hgrn2";

/// The inputs in the dtype of the computation, with padding and document starts written into them.
struct Inputs {
  at::Tensor q, k, v, log_g, first;

  Inputs(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const at::Tensor& log_g_in,
         const RecurrenceOptions& options) {
    for (const auto* x : {&q_in, &k_in, &v_in, &log_g_in}) check_floating(kOp, "an input", *x);
    check_dim(kOp, "q", q_in, 4, "(B, T, H, K)");
    check_dim(kOp, "v", v_in, 4, "(B, T, H, V)");
    check_shape(kOp, "k", k_in, q_in.sizes(), "(B, T, H, K)");
    check_shape(kOp, "log_g", log_g_in, q_in.sizes(), "(B, T, H, K)");
    check_shape(kOp, "v", v_in, {q_in.size(0), q_in.size(1), q_in.size(2), v_in.size(3)}, "(B, T, H, V)");
    const std::vector<int64_t> state_shape{q_in.size(0), q_in.size(2), q_in.size(3), v_in.size(3)};
    check_recurrence(kOp, options, q_in.size(0), q_in.size(1), state_shape, "(B, H, K, V)");
    const auto type = compute_type(q_in.scalar_type());
    const double scale = 1 / std::sqrt(static_cast<double>(q_in.size(3)));
    q = without_padding(cast(q_in, type), options.seq_start) * scale;
    k = without_padding(cast(k_in, type), options.seq_start);
    v = without_padding(cast(v_in, type), options.seq_start);
    log_g = with_resets(cast(log_g_in, type), options);
    first = initial_state(options, state_shape, q);
  }
};

/// One token: the state after it, and what it reads.
RecurrenceResult step(const Inputs& in, int64_t t, const at::Tensor& state) {
  const auto at_t = [&](const at::Tensor& x) { return x.select(1, t); };
  const auto next = at_t(in.log_g).exp().unsqueeze(-1) * state + at_t(in.k).unsqueeze(-1) * at_t(in.v).unsqueeze(-2);
  return {at::matmul(at_t(in.q).unsqueeze(-2), next).squeeze(-2), next};
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

RecurrenceResult chunked(const Inputs& in, int64_t chunk_size) {
  const int64_t length = in.q.size(1);
  const auto chunk = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::min(chunk_size, length))));
  const auto q = to_chunks(in.q, chunk), k = to_chunks(in.k, chunk), v = to_chunks(in.v, chunk);
  const auto within = within_chunk(q, k, to_chunks(in.log_g, chunk));
  const auto added = at::matmul((k * within.suffix.exp()).transpose(-1, -2), v);
  const auto decay = within.prefix.select(-2, chunk - 1).exp().unsqueeze(-1);
  const auto states = scan_chunks(decay, added, in.first);
  const auto o = at::matmul(within.weights, v) + at::matmul(q * within.prefix.exp(), states.before_BHnKV);
  return {from_chunks(o, length), states.last_BHKV};
}

}  // namespace

RecurrenceResult hgrn2(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                       const at::Tensor& log_g_BTHK, const RecurrenceOptions& options) {
  const Inputs in(q_BTHK, k_BTHK, v_BTHV, log_g_BTHK, options);
  if (q_BTHK.size(1) > 1) {
    const auto result = chunked(in, options.chunk_size);
    return {cast(result.o, v_BTHV.scalar_type()), result.state};
  }
  const auto result = step(in, 0, in.first);
  return {cast(result.o.unsqueeze(1), v_BTHV.scalar_type()), result.state};
}

RecurrenceResult hgrn2_reference(const at::Tensor& q_BTHK, const at::Tensor& k_BTHK, const at::Tensor& v_BTHV,
                                 const at::Tensor& log_g_BTHK, const RecurrenceOptions& options) {
  const Inputs in(q_BTHK, k_BTHK, v_BTHV, log_g_BTHK, options);
  std::vector<at::Tensor> o;
  auto state = in.first;
  for (int64_t t = 0; t < in.q.size(1); ++t) {
    const auto result = step(in, t, state);
    o.push_back(result.o);
    state = result.state;
  }
  return {cast(at::stack(o, 1), v_BTHV.scalar_type()), state};
}

}  // namespace fox::ops
