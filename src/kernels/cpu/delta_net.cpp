// The delta rule, chunk after chunk of up to 64 tokens, a head a task. Chunks end where a document does.
//
// With S the state before a chunk, token i finds the error e_i = v_i - Sᵀ k_i - Σ_{j<i} (k_i·k_j) n_j and writes
// n_i = beta_i e_i under its key: a triangular system. S is at hand, so it is solved for the values that are written
// alone and not, as in the WY form, for the keys as well. It is solved by blocks of 16 tokens: what earlier blocks say
// is a matrix product. Then O = Q S + P N with P the causal part of Q Kᵀ, and S += Kᵀ N.
//
// Matrices of token pairs are kept transposed, a row j an earlier token, a column i a later one: matrix_tile-inl.h says
// for what.
#include "kernels/cpu/delta_net.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/delta_net.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/chunk_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {
namespace {

constexpr int64_t kBase = 16;  // tokens of a block that is solved row after row

/// One chunk of one head, in memory that lives as long as the head's task. Widths are padded to vectors.
template <class T>
struct DeltaNetChunk {
  const DeltaNetParams<T>& p;
  const int64_t keys, values;  // padded
  int64_t rows = 0;
  T *q, *k;       // (64, keys)
  T *error, *n;   // (64, values): what the tokens find, what they write
  T* beta;        // (64,)
  T* overlap;     // (64, 64): -k_j·k_i, j < i, 0 elsewhere
  T* weights;     // (64, 64): k_j·q_i, j <= i, 0 elsewhere
  T* transposed;  // (keys, 64)
  hwy::AlignedFreeUniquePtr<T[]> memory;

  explicit DeltaNetChunk(const DeltaNetParams<T>& params)
      : p(params), keys(padded_dim<T>(params.keys)), values(padded_dim<T>(params.values)) {
    const int64_t of_keys = kChunk * keys, of_values = kChunk * values, of_pairs = kChunk * kChunk;
    memory = allocate_arrays<T>({{&q, of_keys},
                                 {&k, of_keys},
                                 {&error, of_values},
                                 {&n, of_values},
                                 {&beta, kChunk},
                                 {&overlap, of_pairs},
                                 {&weights, of_pairs},
                                 {&transposed, of_keys}});
  }

  /// Everything that the chunk writes, given the state before it; a state that a document leaves behind is set to 0.
  void write(int64_t b, int64_t h, const TokenChunk& chunk, T* state) {
    rows = chunk.rows;
    if (chunk.fresh) std::fill_n(state, p.keys * values, T(0));
    pack_rows(p.k.at(b, chunk.begin, h), p.k.time, rows, p.keys, k);
    pack_rows_times(p.v.at(b, chunk.begin, h), p.v.time, rows, p.values, T(-1), error);
    for (int64_t i = 0; i < rows; ++i) beta[i] = *p.beta.at(b, chunk.begin + i, h);
    meet_later(k, overlap);
    keep_future(overlap, rows, 1, T(-1));
    multiply<false>(Product<T>{k, keys, state, values, error, values, rows, p.values, p.keys, true});
    scale(T(-1), error, rows * values);
    solve();
  }

  void load_queries(int64_t b, int64_t h, const TokenChunk& chunk) {
    pack_rows_times(p.q.at(b, chunk.begin, h), p.q.time, rows, p.keys, p.scale, q);
    meet_later(q, weights);
    keep_future(weights, rows, 0);
  }

  void advance(T* state) const {
    multiply<true>(Product<T>{k, keys, n, values, state, values, p.keys, p.values, rows, /*add=*/true});
  }

  /// The system in reverse. dn: gradients of what is written but for what later tokens find of it, which is added;
  /// derror = beta dn.
  void solve_transposed(T* dn, T* derror) const {
    for (int64_t begin = (rows - 1) / kBase * kBase; begin >= 0; begin -= kBase) {
      const int64_t end = std::min(begin + kBase, rows);
      if (end < rows) {
        multiply<false>(Product<T>{overlap + begin * kChunk + end, kChunk, derror + end * values, values,
                                   dn + begin * values, values, end - begin, p.values, rows - end, true});
      }
      for (int64_t j = end - 1; j >= begin; --j) {
        add_rows(overlap + j * kChunk + j + 1, 1, derror, j + 1, end, dn + j * values, derror + j * values, beta[j]);
      }
    }
  }

 private:
  /// pairs: k_j·x_i, i >= j.
  void meet_later(const T* x, T* pairs) {
    transpose(x, keys, rows, p.keys, transposed, kChunk);
    multiply<false>(
        Product<T>{k, keys, transposed, kChunk, pairs, kChunk, rows, rows, p.keys, false, Triangle::kOutput});
  }

  void solve() {
    for (int64_t begin = 0; begin < rows; begin += kBase) {
      const int64_t end = std::min(begin + kBase, rows);
      if (begin > 0) {
        multiply<true>(Product<T>{overlap + begin, kChunk, n, values, error + begin * values, values, end - begin,
                                  p.values, begin, true});
      }
      for (int64_t i = begin; i < end; ++i) {
        add_rows(overlap + begin * kChunk + i, kChunk, n, begin, i, error + i * values, n + i * values, beta[i]);
      }
    }
  }

  /// sum += Σ weight * row of x, over rows [begin, end); shared = sum * share.
  HWY_INLINE void add_rows(const T* row_weights, int64_t stride, const T* x, int64_t begin, int64_t end, T* sum,
                           T* shared, T share) const {
    const Tag<T> d;
    for_each_columns<T>(values, [&]<int V>(int64_t c) HWY_ATTR {
      hn::Vec<Tag<T>> total[V];
      for (int v = 0; v < V; ++v) total[v] = hn::Load(d, sum + c + v * kLanes<T>);
      for (int64_t j = begin; j < end; ++j) {
        const auto weight = hn::Set(d, row_weights[(j - begin) * stride]);
        HWY_UNROLL(4)
        for (int v = 0; v < V; ++v) {
          total[v] = hn::MulAdd(weight, hn::Load(d, x + j * values + c + v * kLanes<T>), total[v]);
        }
      }
      for (int v = 0; v < V; ++v) {
        hn::Store(total[v], d, sum + c + v * kLanes<T>);
        hn::Store(hn::Mul(total[v], hn::Set(d, share)), d, shared + c + v * kLanes<T>);
      }
    });
  }
};

template <class T>
void delta_net_forward_head(DeltaNetChunk<T>& x, const std::vector<TokenChunk>& chunks, const HeadRows<T>& o, T* last,
                            T* kept, int64_t head) {
  const auto& p = x.p;
  const int64_t b = head / p.heads, h = head % p.heads;
  T *state, *out;
  const auto memory = allocate_arrays<T>({{&state, p.keys * x.values}, {&out, kChunk * x.values}});
  pack_rows(p.first + head * p.state_size(), p.values, p.keys, p.values, state);
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (i > 0 && i % kKeptEvery == 0) {
      T* to = kept + ((static_cast<int64_t>(i) / kKeptEvery - 1) * p.batch * p.heads + head) * p.state_size();
      unpack_rows(state, p.keys, p.values, T(1), to, p.values);
    }
    x.write(b, h, chunks[i], state);
    x.load_queries(b, h, chunks[i]);
    multiply<true>(Product<T>{x.weights, kChunk, x.n, x.values, out, x.values, x.rows, p.values, x.rows, false,
                              Triangle::kDepthBelow});
    multiply<false>(Product<T>{x.q, x.keys, state, x.values, out, x.values, x.rows, p.values, p.keys, true});
    unpack_rows(out, x.rows, p.values, T(1), o.at(b, chunks[i].begin, h), o.time);
    x.advance(state);
  }
  unpack_rows(state, p.keys, p.values, T(1), last + head * p.state_size(), p.values);
}

// ------------------------------------------------------------------------------------------------------ backward

/// A chunk and its gradients.
template <class T>
struct DeltaNetChunkGradients {
  DeltaNetChunk<T>& x;
  T *dq, *dk, *keys_t;              // (64, keys), the last (keys, 64)
  T *d_o, *dn, *derror, *values_t;  // (64, values), the last (values, 64)
  T *dpairs, *dbeta;                // (64, 64), (64,)
  hwy::AlignedFreeUniquePtr<T[]> memory;

  explicit DeltaNetChunkGradients(DeltaNetChunk<T>& chunk) : x(chunk) {
    const int64_t of_keys = kChunk * x.keys, of_values = kChunk * x.values;
    memory = allocate_arrays<T>({{&dq, of_keys},
                                 {&dk, of_keys},
                                 {&keys_t, of_keys},
                                 {&d_o, of_values},
                                 {&dn, of_values},
                                 {&derror, of_values},
                                 {&values_t, of_values},
                                 {&dpairs, kChunk * kChunk},
                                 {&dbeta, kChunk}});
  }

  /// Of x, given those of its output in d_o; those of the values are minus derror. dstate: of the state behind the
  /// chunk, then of the one before.
  void compute(const T* state, T* dstate) {
    const int64_t rows = x.rows, keys = x.keys, values = x.values, K = x.p.keys, V = x.p.values;
    multiply<false>(
        Product<T>{x.weights, kChunk, d_o, values, dn, values, rows, V, rows, false, Triangle::kDepthAbove});
    multiply<false>(Product<T>{x.k, keys, dstate, values, dn, values, rows, V, K, true});
    // dK of S += Kᵀ N, transposed.
    transpose(x.n, values, rows, V, values_t, kChunk);
    multiply<false>(Product<T>{dstate, values, values_t, kChunk, keys_t, kChunk, K, rows, V});
    queries(state, dstate);
    x.solve_transposed(dn, derror);
    for (int64_t i = 0; i < rows; ++i) dbeta[i] = dot(dn + i * values, x.error + i * values, values);
    scale(T(-1), derror, rows * values);
    // dK of E = V - K S - …, transposed; then what pairs of tokens bring.
    transpose(derror, values, rows, V, values_t, kChunk);
    multiply<false>(Product<T>{state, values, values_t, kChunk, keys_t, kChunk, K, rows, V, true});
    transpose(keys_t, kChunk, K, rows, dk, keys);
    multiply<false>(Product<T>{dpairs, kChunk, x.q, keys, dk, keys, rows, K, rows, true, Triangle::kDepthAbove});
    of_pairs(1);
    multiply<false>(Product<T>{dpairs, kChunk, x.k, keys, dk, keys, rows, K, rows, true, Triangle::kDepthAbove});
    multiply<true>(Product<T>{dpairs, kChunk, x.k, keys, dk, keys, rows, K, rows, true, Triangle::kDepthBelow});
    multiply<true>(Product<T>{x.k, keys, derror, values, dstate, values, K, V, rows, true});
  }

 private:
  /// dQ, the gradients of the weights (in dpairs), and what the queries bring to dstate.
  void queries(const T* state, T* dstate) {
    const int64_t rows = x.rows, keys = x.keys, values = x.values, K = x.p.keys, V = x.p.values;
    transpose(d_o, values, rows, V, values_t, kChunk);
    multiply<false>(Product<T>{state, values, values_t, kChunk, x.transposed, kChunk, K, rows, V});
    transpose(x.transposed, kChunk, K, rows, dq, keys);
    of_pairs(0);
    multiply<true>(Product<T>{dpairs, kChunk, x.k, keys, dq, keys, rows, K, rows, true, Triangle::kDepthBelow});
    multiply<true>(Product<T>{x.q, keys, d_o, values, dstate, values, K, V, rows, true});
  }

  /// dpairs: n_j with column i of values_t, i >= j + diagonal.
  void of_pairs(int64_t diagonal) {
    multiply<false>(Product<T>{x.n, x.values, values_t, kChunk, dpairs, kChunk, x.rows, x.rows, x.p.values, false,
                               Triangle::kOutput});
    keep_future(dpairs, x.rows, diagonal);
  }
};

template <class T>
void delta_net_backward_head(DeltaNetChunkGradients<T>& y, const std::vector<TokenChunk>& chunks, const T* kept,
                             const DeltaNetGradients<T>& grads, int64_t head) {
  auto& x = y.x;
  const auto& p = x.p;
  const int64_t b = head / p.heads, h = head % p.heads, state_size = p.keys * x.values;
  T *dstate, *states;
  const auto memory = allocate_arrays<T>({{&dstate, state_size}, {&states, kKeptEvery * state_size}});
  pack_rows(grads.dlast + head * p.state_size(), p.values, p.keys, p.values, dstate);
  const auto count = static_cast<int64_t>(chunks.size());
  for (int64_t segment = kept_states(count); segment >= 0; --segment) {
    const int64_t begin = segment * kKeptEvery, end = std::min(begin + kKeptEvery, count);
    const auto state_before = [&](int64_t i) { return states + (i - begin) * state_size; };
    const T* from = segment == 0 ? p.first : kept + (segment - 1) * p.batch * p.heads * p.state_size();
    pack_rows(from + head * p.state_size(), p.values, p.keys, p.values, states);
    for (int64_t i = begin; i + 1 < end; ++i) {
      x.write(b, h, chunks[i], state_before(i));
      std::copy_n(state_before(i), state_size, state_before(i + 1));
      x.advance(state_before(i + 1));
    }
    for (int64_t i = end - 1; i >= begin; --i) {
      const auto& chunk = chunks[i];
      x.write(b, h, chunk, state_before(i));
      x.load_queries(b, h, chunk);
      pack_rows(grads.d_o.at(b, chunk.begin, h), grads.d_o.time, x.rows, p.values, y.d_o);
      y.compute(state_before(i), dstate);
      if (chunk.fresh) std::fill_n(dstate, state_size, T(0));
      unpack_rows(y.dq, x.rows, p.keys, p.scale, grads.dq.at(b, chunk.begin, h), grads.dq.time);
      unpack_rows(y.dk, x.rows, p.keys, T(1), grads.dk.at(b, chunk.begin, h), grads.dk.time);
      unpack_rows(y.derror, x.rows, p.values, T(-1), grads.dv.at(b, chunk.begin, h), grads.dv.time);
      for (int64_t n = 0; n < x.rows; ++n) *grads.dbeta.at(b, chunk.begin + n, h) = y.dbeta[n];
    }
  }
  unpack_rows(dstate, p.keys, p.values, T(1), grads.dfirst + head * p.state_size(), p.values);
}

using Chunks = std::vector<TokenChunk>;
/// One token that starts no document: some columns of the state after others, each read twice while it is near.
template <class T>
void delta_net_step(const DeltaNetParams<T>& p, const HeadRows<T>& o, T* last, int64_t head) {
  const int64_t b = head / p.heads, h = head % p.heads;
  const T *q = p.q.at(b, 0, h), *k = p.k.at(b, 0, h), *v = p.v.at(b, 0, h), *before = p.first + head * p.state_size();
  T* after = last + head * p.state_size();
  for_each_block<T>(0, p.values, [&]<int V>(const auto& io, int64_t column) HWY_ATTR {
    const Tag<T> d;
    hn::Vec<Tag<T>> written[V], sum[V];
    for (int n = 0; n < V; ++n) written[n] = io.load(v + column + n * kLanes<T>), sum[n] = hn::Zero(d);
    for (int64_t c = 0; c < p.keys; ++c) {
      const auto key = hn::Set(d, k[c]);
      HWY_UNROLL(4)
      for (int n = 0; n < V; ++n) {
        written[n] = hn::NegMulAdd(key, io.load(before + c * p.values + column + n * kLanes<T>), written[n]);
      }
    }
    for (int n = 0; n < V; ++n) written[n] = hn::Mul(written[n], hn::Set(d, *p.beta.at(b, 0, h)));
    for (int64_t c = 0; c < p.keys; ++c) {
      const auto key = hn::Set(d, k[c]), query = hn::Set(d, q[c] * p.scale);
      HWY_UNROLL(4)
      for (int n = 0; n < V; ++n) {
        const int64_t at = c * p.values + column + n * kLanes<T>;
        const auto state = hn::MulAdd(key, written[n], io.load(before + at));
        io.store(state, after + at);
        sum[n] = hn::MulAdd(query, state, sum[n]);
      }
    }
    for (int n = 0; n < V; ++n) io.store(sum[n], o.at(b, 0, h) + column + n * kLanes<T>);
  });
}

/// Heads [begin, end), in one thread's memory.
template <class T>
void delta_net_forward_heads(const DeltaNetParams<T>& p, const Chunks& chunks, const HeadRows<T>& o, T* last, T* kept,
                             int64_t begin, int64_t end) {
  const FlushDenormals flush;
  if (p.length == 1 && !chunks[0].fresh) {
    for (int64_t head = begin; head < end; ++head) delta_net_step(p, o, last, head);
    return;
  }
  DeltaNetChunk<T> x(p);
  for (int64_t head = begin; head < end; ++head) delta_net_forward_head(x, chunks, o, last, kept, head);
}
template <class T>
void delta_net_backward_heads(const DeltaNetParams<T>& p, const Chunks& chunks, const T* kept,
                              const DeltaNetGradients<T>& g, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  DeltaNetChunk<T> x(p);
  DeltaNetChunkGradients<T> y(x);
  for (int64_t head = begin; head < end; ++head) delta_net_backward_head(y, chunks, kept, g, head);
}

void forward_f32(const DeltaNetParams<float>& p, const Chunks& chunks, const HeadRows<float>& o, float* last,
                 float* kept, int64_t begin, int64_t end) {
  delta_net_forward_heads(p, chunks, o, last, kept, begin, end);
}
void forward_f64(const DeltaNetParams<double>& p, const Chunks& chunks, const HeadRows<double>& o, double* last,
                 double* kept, int64_t begin, int64_t end) {
  delta_net_forward_heads(p, chunks, o, last, kept, begin, end);
}
void backward_f32(const DeltaNetParams<float>& p, const Chunks& chunks, const float* kept,
                  const DeltaNetGradients<float>& g, int64_t begin, int64_t end) {
  delta_net_backward_heads(p, chunks, kept, g, begin, end);
}
void backward_f64(const DeltaNetParams<double>& p, const Chunks& chunks, const double* kept,
                  const DeltaNetGradients<double>& g, int64_t begin, int64_t end) {
  delta_net_backward_heads(p, chunks, kept, g, begin, end);
}

}  // namespace
}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_f64);
HWY_EXPORT(backward_f32);
HWY_EXPORT(backward_f64);

}  // namespace

int64_t delta_net_kept(int64_t length, const bool* starts) {
  return kept_states(static_cast<int64_t>(cut_chunks(length, starts).size()));
}

template <>
void delta_net(const DeltaNetParams<float>& p, const HeadRows<float>& o, float* last, float* kept) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_f32);
  const auto chunks = cut_chunks(p.length, p.starts);
  parallel_pieces(p.batch * p.heads, 1,
                  [&](int64_t begin, int64_t end, int64_t) { run(p, chunks, o, last, kept, begin, end); });
}
template <>
void delta_net(const DeltaNetParams<double>& p, const HeadRows<double>& o, double* last, double* kept) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_f64);
  const auto chunks = cut_chunks(p.length, p.starts);
  parallel_pieces(p.batch * p.heads, 1,
                  [&](int64_t begin, int64_t end, int64_t) { run(p, chunks, o, last, kept, begin, end); });
}
template <>
void delta_net_backward(const DeltaNetParams<float>& p, const float* kept, const DeltaNetGradients<float>& g) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward_f32);
  const auto chunks = cut_chunks(p.length, p.starts);
  parallel_pieces(p.batch * p.heads, 1,
                  [&](int64_t begin, int64_t end, int64_t) { run(p, chunks, kept, g, begin, end); });
}
template <>
void delta_net_backward(const DeltaNetParams<double>& p, const double* kept, const DeltaNetGradients<double>& g) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward_f64);
  const auto chunks = cut_chunks(p.length, p.starts);
  parallel_pieces(p.batch * p.heads, 1,
                  [&](int64_t begin, int64_t end, int64_t) { run(p, chunks, kept, g, begin, end); });
}

}  // namespace fox::kernels
#endif
