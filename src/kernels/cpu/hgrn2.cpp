// Gated linear attention, chunk after chunk of 64 tokens, a head a task.
//
// Within a chunk the weight of key j for query i is Σ_c q_ic k_jc Π_{j < l <= i} g_lc, a decay of its own for every
// channel and pair. Blocks of 16 tokens follow the recurrence: decayed keys, multiplied by one gate after another.
// Blocks are then merged pairwise: what lies between a query of the second and a key of the first is a prefix of the
// one and a suffix of the other, so that queries and keys are scaled and multiplied as matrices (`Levels`). Decays are
// products of gates between the two tokens and of nothing else, never quotients: no overflow, a gate of 0 is an
// ordinary value, and a strong gate does not cost its neighbours digits.
//
// Gradients of a log gate are what flows across it, added up as such and never as a difference of what came from before
// and after. Weights are kept transposed, a row a key: matrix_tile-inl.h says for what.
#include "kernels/cpu/hgrn2.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/hgrn2.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/chunk_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {
namespace {

constexpr int64_t kBase = 16;   // tokens of a block that follows the recurrence
constexpr int64_t kLevels = 2;  // blocks of 16, then of 32 are merged
static_assert(kBase << kLevels == kChunk);

/// One chunk of one head, in memory that lives as long as the head's task. Widths are padded to vectors.
template <class T>
struct Hgrn2Chunk {
  const Hgrn2Params<T>& p;
  const int64_t keys, values;  // padded
  int64_t rows = 0;
  T *q, *k, *g, *v;
  T* scaled[kLevels];    // (64, keys): tokens of second blocks as queries, of first blocks as keys
  T *q_state, *k_state;  // what meets the state before, and what is left for the one behind
  T* across;             // (keys, 64), some queries transposed
  T *weights, *decayed;  // (64 keys, 64 queries); (16, keys)
  T* total;              // (keys,): what the chunk leaves of the state before
  hwy::AlignedFreeUniquePtr<T[]> memory;

  explicit Hgrn2Chunk(const Hgrn2Params<T>& params)
      : p(params), keys(padded_dim<T>(params.keys)), values(padded_dim<T>(params.values)) {
    const int64_t of_keys = kChunk * keys;
    memory = allocate_arrays<T>({{&q, of_keys},
                                 {&k, of_keys},
                                 {&g, of_keys},
                                 {&v, kChunk * values},
                                 {&scaled[0], of_keys},
                                 {&scaled[1], of_keys},
                                 {&q_state, of_keys},
                                 {&k_state, of_keys},
                                 {&across, of_keys},
                                 {&weights, kChunk * kChunk},
                                 {&decayed, kBase * keys},
                                 {&total, keys}});
  }

  /// Keys, gates and values of a chunk, which is what carries the state on.
  void load_keys(int64_t b, int64_t h, int64_t chunk) {
    const int64_t t = chunk * kChunk;
    rows = std::min(kChunk, p.length - t);
    pack_rows(p.k.at(b, t, h), p.k.time, rows, p.keys, k);
    pack_rows(p.v.at(b, t, h), p.v.time, rows, p.values, v);
    pack_rows(p.log_g.at(b, t, h), p.log_g.time, rows, p.keys, g,
              [](auto x) HWY_ATTR { return exp_checked(Tag<T>(), x); });
    suffix_products(k, g, rows, keys, k_state, total);
  }
  void load_queries(int64_t b, int64_t h, int64_t chunk) {
    pack_rows_times(p.q.at(b, chunk * kChunk, h), p.q.time, rows, p.keys, p.scale, q);
    prefix_products(q, g, rows, keys, q_state);
  }

  /// state (keys, values) behind the chunk.
  void advance(T* state) const {
    scale_rows(total, state, p.keys, values, state);
    multiply<true>(Product<T>{k_state, keys, v, values, state, values, p.keys, p.values, rows, /*add=*/true});
  }

  /// Calls f(level, first token of the first block, of the second, tokens of the second) for all pairs of blocks.
  template <class F>
  void for_each_pair(const F& f) const {
    for (int64_t level = 0; level < kLevels; ++level) {
      const int64_t half = kBase << level;
      for (int64_t first = 0; first + half < rows; first += 2 * half) {
        f(level, first, first + half, std::min(half, rows - first - half));
      }
    }
  }

  void compute_weights() {
    for (int64_t begin = 0; begin < rows; begin += kBase) base_weights(begin, std::min(kBase, rows - begin));
    for_each_pair([&](int64_t level, int64_t first, int64_t second, int64_t count) {
      T* x = scaled[level];
      suffix_products(k + first * keys, g + first * keys, second - first, keys, x + first * keys);
      prefix_products(q + second * keys, g + second * keys, count, keys, x + second * keys);
      transpose(x + second * keys, keys, count, p.keys, across, kChunk);
      multiply<false>(Product<T>{x + first * keys, keys, across, kChunk, weights + first * kChunk + second, kChunk,
                                 second - first, count, p.keys});
    });
  }

  /// Within a block: at query i, row j of `decayed` is key j times the gates behind it. Four keys at a time; rows of
  /// keys to come are 0.
  HWY_NOINLINE void base_weights(int64_t begin, int64_t count) {
    const Tag<T> d;
    std::fill_n(decayed, kBase * keys, T(0));
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(k + (begin + i) * keys, keys, decayed + i * keys);
      const T* query = q + (begin + i) * keys;
      const T* gate = g + std::min(begin + i + 1, begin + count - 1) * keys;  // of the next token
      for (int64_t j = 0; j <= i; j += kTogether) {
        hn::Vec<Tag<T>> sums[kTogether];
        HWY_UNROLL(4)
        for (auto& sum : sums) sum = hn::Zero(d);
        for (int64_t c = 0; c < keys; c += kLanes<T>) {
          const auto qc = hn::LoadU(d, query + c), gc = hn::LoadU(d, gate + c);
          HWY_UNROLL(4)
          for (int n = 0; n < kTogether; ++n) {
            T* at = decayed + (j + n) * keys + c;
            const auto key = hn::LoadU(d, at);
            sums[n] = hn::MulAdd(qc, key, sums[n]);
            hn::StoreU(hn::Mul(key, gc), d, at);
          }
        }
        for (int64_t n = 0; n < std::min<int64_t>(kTogether, i + 1 - j); ++n) {
          weights[(begin + j + n) * kChunk + begin + i] = hn::GetLane(hn::SumOfLanes(d, sums[n]));
        }
      }
    }
  }
};

template <class T>
void hgrn2_forward_head(Hgrn2Chunk<T>& x, const HeadRows<T>& o, T* last, T* kept, int64_t head) {
  const auto& p = x.p;
  const int64_t b = head / p.heads, h = head % p.heads;
  T *state, *out;
  const auto memory = allocate_arrays<T>({{&state, p.keys * x.values}, {&out, kChunk * x.values}});
  pack_rows(p.first + head * p.state_size(), p.values, p.keys, p.values, state);
  for (int64_t chunk = 0; chunk < chunks_of(p.length); ++chunk) {
    if (chunk > 0 && chunk % kKeptEvery == 0) {
      T* to = kept + ((chunk / kKeptEvery - 1) * p.batch * p.heads + head) * p.state_size();
      unpack_rows(state, p.keys, p.values, T(1), to, p.values);
    }
    x.load_keys(b, h, chunk);
    x.load_queries(b, h, chunk);
    x.compute_weights();
    multiply<true>(Product<T>{x.weights, kChunk, x.v, x.values, out, x.values, x.rows, p.values, x.rows, false,
                              Triangle::kDepthBelow});
    multiply<false>(Product<T>{x.q_state, x.keys, state, x.values, out, x.values, x.rows, p.values, p.keys, true});
    unpack_rows(out, x.rows, p.values, T(1), o.at(b, chunk * kChunk, h), o.time);
    x.advance(state);
  }
  unpack_rows(state, p.keys, p.values, T(1), last + head * p.state_size(), p.values);
}

// ------------------------------------------------------------------------------------------------------ backward

/// d_y: gradients of y_i = x_i times the gates of rows 0 … i. Adds those of x to dx and what flows across each gate to
/// dlog_g; d_y is overwritten.
template <class T>
HWY_NOINLINE void prefix_gradients(const T* x, const T* g, int64_t rows, int64_t width, T* d_y, T* dx, T* dlog_g) {
  const Tag<T> d;
  for_each_columns<T>(width, [&]<int V>(int64_t c) HWY_ATTR {
    hn::Vec<Tag<T>> gates[V], flow[V];
    for (int v = 0; v < V; ++v) gates[v] = hn::Set(d, T(1)), flow[v] = hn::Zero(d);
    for (int64_t i = 0; i < rows; ++i) {
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const int64_t at = i * width + c + v * kLanes<T>;
        gates[v] = hn::Mul(gates[v], hn::LoadU(d, g + at));
        const auto own = hn::Mul(gates[v], hn::LoadU(d, d_y + at));
        hn::StoreU(hn::Add(hn::LoadU(d, dx + at), own), d, dx + at);
        hn::StoreU(hn::Mul(hn::LoadU(d, x + at), own), d, d_y + at);
      }
    }
    for (int64_t i = rows - 1; i >= 0; --i) {
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const int64_t at = i * width + c + v * kLanes<T>;
        flow[v] = hn::Add(flow[v], hn::LoadU(d, d_y + at));
        hn::StoreU(hn::Add(hn::LoadU(d, dlog_g + at), flow[v]), d, dlog_g + at);
      }
    }
  });
}

/// The same of x_j times the gates of rows j + 1 … rows - 1. `through`, if not null, flows across all of them.
template <class T>
HWY_NOINLINE void suffix_gradients(const T* x, const T* g, int64_t rows, int64_t width, T* d_y, T* dx, T* dlog_g,
                                   const T* through = nullptr) {
  const Tag<T> d;
  for_each_columns<T>(width, [&]<int V>(int64_t c) HWY_ATTR {
    hn::Vec<Tag<T>> gates[V], flow[V];
    for (int v = 0; v < V; ++v) {
      gates[v] = hn::Set(d, T(1));
      flow[v] = through == nullptr ? hn::Zero(d) : hn::LoadU(d, through + c + v * kLanes<T>);
    }
    for (int64_t j = rows - 1; j >= 0; --j) {
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const int64_t at = j * width + c + v * kLanes<T>;
        const auto own = hn::Mul(gates[v], hn::LoadU(d, d_y + at));
        hn::StoreU(hn::Add(hn::LoadU(d, dx + at), own), d, dx + at);
        hn::StoreU(hn::Mul(hn::LoadU(d, x + at), own), d, d_y + at);
        gates[v] = hn::Mul(gates[v], hn::LoadU(d, g + at));
      }
    }
    for (int64_t j = 0; j < rows; ++j) {
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const int64_t at = j * width + c + v * kLanes<T>;
        hn::StoreU(hn::Add(hn::LoadU(d, dlog_g + at), flow[v]), d, dlog_g + at);
        flow[v] = hn::Add(flow[v], hn::LoadU(d, d_y + at));
      }
    }
  });
}

/// A chunk and its gradients.
template <class T>
struct Hgrn2ChunkGradients {
  Hgrn2Chunk<T>& x;
  T *dq, *dk, *dlog_g, *dscaled;     // (64, keys)
  T *d_o, *dv;                       // (64, values)
  T *values_t, *keys_t;              // (values, 64), (keys, 64)
  T* dweights;                       // (64 keys, 64 queries); below the diagonal anything
  T *history, *d_decayed, *through;  // (16, 16) and (16,) vectors; (keys,)
  hwy::AlignedFreeUniquePtr<T[]> memory;

  explicit Hgrn2ChunkGradients(Hgrn2Chunk<T>& chunk) : x(chunk) {
    const int64_t of_keys = kChunk * x.keys, of_values = kChunk * x.values;
    memory = allocate_arrays<T>({{&dq, of_keys},
                                 {&dk, of_keys},
                                 {&dlog_g, of_keys},
                                 {&dscaled, of_keys},
                                 {&d_o, of_values},
                                 {&dv, of_values},
                                 {&values_t, of_values},
                                 {&keys_t, of_keys},
                                 {&dweights, kChunk * kChunk},
                                 {&history, kBase * kBase * kLanes<T>},
                                 {&d_decayed, kBase * kLanes<T>},
                                 {&through, x.keys}});
  }

  /// Of x, given those of its output in d_o. dstate: of the state behind the chunk, then of the one before.
  void compute(const T* state, T* dstate) {
    const int64_t rows = x.rows, keys = x.keys, values = x.values;
    for (T* y : {dq, dk, dlog_g}) std::fill_n(y, rows * keys, T(0));
    x.compute_weights();
    multiply<false>(
        Product<T>{x.weights, kChunk, d_o, values, dv, values, rows, x.p.values, rows, false, Triangle::kDepthAbove});
    multiply<false>(Product<T>{x.k_state, keys, dstate, values, dv, values, rows, x.p.values, x.p.keys, true});
    through_states(state, dstate);
    transpose(d_o, values, rows, x.p.values, values_t, kChunk);
    multiply<false>(
        Product<T>{x.v, values, values_t, kChunk, dweights, kChunk, rows, rows, x.p.values, false, Triangle::kOutput});
    x.for_each_pair([&](int64_t level, int64_t first, int64_t second, int64_t count) {
      between_blocks(x.scaled[level], first, second, count);
    });
    for (int64_t begin = 0; begin < rows; begin += kBase) within_block(begin, std::min(kBase, rows - begin));
  }

 private:
  /// What goes by way of the states before and behind the chunk.
  void through_states(const T* state, T* dstate) {
    const int64_t rows = x.rows, keys = x.keys, values = x.values;
    const auto per_token = [&](const T* of_tokens, const T* of_state) {  // (rows, keys) = of_tokens of_stateᵀ
      transpose(of_tokens, values, rows, x.p.values, values_t, kChunk);
      multiply<false>(Product<T>{of_state, values, values_t, kChunk, keys_t, kChunk, x.p.keys, rows, x.p.values});
      transpose(keys_t, kChunk, x.p.keys, rows, dscaled, keys);
    };
    for (int64_t c = 0; c < x.p.keys; ++c) {
      through[c] = x.total[c] * dot(state + c * values, dstate + c * values, values);
    }
    per_token(x.v, dstate);
    suffix_gradients(x.k, x.g, rows, keys, dscaled, dk, dlog_g, through);
    per_token(d_o, state);
    prefix_gradients(x.q, x.g, rows, keys, dscaled, dq, dlog_g);
    scale_rows(x.total, dstate, x.p.keys, values, dstate);
    multiply<true>(Product<T>{x.q_state, keys, d_o, values, dstate, values, x.p.keys, x.p.values, rows, true});
  }

  void between_blocks(const T* scaled, int64_t first, int64_t second, int64_t count) {
    const int64_t keys = x.keys, half = second - first, to_keys = first * keys, to_queries = second * keys;
    const T* dw = dweights + first * kChunk + second;
    multiply<false>(Product<T>{dw, kChunk, scaled + to_queries, keys, dscaled + to_keys, keys, half, x.p.keys, count});
    multiply<true>(Product<T>{dw, kChunk, scaled + to_keys, keys, dscaled + to_queries, keys, count, x.p.keys, half});
    suffix_gradients(x.k + to_keys, x.g + to_keys, half, keys, dscaled + to_keys, dk + to_keys, dlog_g + to_keys);
    prefix_gradients(x.q + to_queries, x.g + to_queries, count, keys, dscaled + to_queries, dq + to_queries,
                     dlog_g + to_queries);
  }

  /// Token after token and back again, a vector of channels at a time: history (i, j) is key j decayed up to query i.
  HWY_NOINLINE void within_block(int64_t begin, int64_t count) {
    const Tag<T> d;
    constexpr int64_t L = kLanes<T>;
    for (int64_t c = 0; c < x.keys; c += L) {
      const auto at = [&](int64_t token) { return (begin + token) * x.keys + c; };
      for (int64_t i = 0; i < count; ++i) {
        const auto gate = hn::LoadU(d, x.g + at(i));
        for (int64_t j = 0; j < i; ++j) {
          const auto before = hn::Load(d, history + ((i - 1) * kBase + j) * L);
          hn::Store(hn::Mul(before, gate), d, history + (i * kBase + j) * L);
        }
        hn::Store(hn::LoadU(d, x.k + at(i)), d, history + i * (kBase + 1) * L);
      }
      std::fill_n(d_decayed, count * L, T(0));
      for (int64_t i = count - 1; i >= 0; --i) {
        const auto query = hn::LoadU(d, x.q + at(i)), gate = hn::LoadU(d, x.g + at(i));
        const T* dw = dweights + begin * kChunk + begin + i;
        const auto own = hn::Set(d, dw[i * kChunk]);
        auto dquery = hn::MulAdd(own, hn::Load(d, history + i * (kBase + 1) * L), hn::LoadU(d, dq + at(i)));
        const auto dkey = hn::MulAdd(own, query, hn::Load(d, d_decayed + i * L));
        hn::StoreU(hn::Add(dkey, hn::LoadU(d, dk + at(i))), d, dk + at(i));
        auto flow = hn::LoadU(d, dlog_g + at(i));
        for (int64_t j = 0; j < i; ++j) {
          const auto weight = hn::Set(d, dw[j * kChunk]), key = hn::Load(d, history + (i * kBase + j) * L);
          const auto dkey_j = hn::MulAdd(weight, query, hn::Load(d, d_decayed + j * L));
          dquery = hn::MulAdd(weight, key, dquery);
          flow = hn::MulAdd(key, dkey_j, flow);
          hn::Store(hn::Mul(dkey_j, gate), d, d_decayed + j * L);
        }
        hn::StoreU(dquery, d, dq + at(i));
        hn::StoreU(flow, d, dlog_g + at(i));
      }
    }
  }
};

template <class T>
void hgrn2_backward_head(Hgrn2ChunkGradients<T>& y, const T* kept, const Hgrn2Gradients<T>& grads, int64_t head) {
  auto& x = y.x;
  const auto& p = x.p;
  const int64_t b = head / p.heads, h = head % p.heads, state_size = p.keys * x.values;
  T *dstate, *states;
  const auto memory = allocate_arrays<T>({{&dstate, state_size}, {&states, kKeptEvery * state_size}});
  pack_rows(grads.dlast + head * p.state_size(), p.values, p.keys, p.values, dstate);
  const int64_t chunks = chunks_of(p.length);
  for (int64_t segment = kept_states(chunks); segment >= 0; --segment) {
    const int64_t begin = segment * kKeptEvery, count = std::min(kKeptEvery, chunks - begin);
    const T* from = segment == 0 ? p.first : kept + (segment - 1) * p.batch * p.heads * p.state_size();
    pack_rows(from + head * p.state_size(), p.values, p.keys, p.values, states);
    for (int64_t n = 1; n < count; ++n) {
      T* next = std::copy_n(states + (n - 1) * state_size, state_size, states + n * state_size) - state_size;
      x.load_keys(b, h, begin + n - 1);
      x.advance(next);
    }
    for (int64_t n = count - 1; n >= 0; --n) {
      const int64_t t = (begin + n) * kChunk;
      x.load_keys(b, h, begin + n);
      x.load_queries(b, h, begin + n);
      pack_rows(grads.d_o.at(b, t, h), grads.d_o.time, x.rows, p.values, y.d_o);
      y.compute(states + n * state_size, dstate);
      unpack_rows(y.dq, x.rows, p.keys, p.scale, grads.dq.at(b, t, h), grads.dq.time);
      unpack_rows(y.dk, x.rows, p.keys, T(1), grads.dk.at(b, t, h), grads.dk.time);
      unpack_rows(y.dlog_g, x.rows, p.keys, T(1), grads.dlog_g.at(b, t, h), grads.dlog_g.time);
      unpack_rows(y.dv, x.rows, p.values, T(1), grads.dv.at(b, t, h), grads.dv.time);
    }
  }
  unpack_rows(dstate, p.keys, p.values, T(1), grads.dfirst + head * p.state_size(), p.values);
}

/// One token: the state is read and written once.
template <class T>
void hgrn2_step(const Hgrn2Params<T>& p, const HeadRows<T>& o, T* last, int64_t head) {
  const int64_t b = head / p.heads, h = head % p.heads;
  const T *q = p.q.at(b, 0, h), *k = p.k.at(b, 0, h), *v = p.v.at(b, 0, h), *log_g = p.log_g.at(b, 0, h);
  const T* before = p.first + head * p.state_size();
  T* after = last + head * p.state_size();
  std::vector<T> g(p.keys);
  for_each_vector<T>(p.keys, [&](const auto& io, int64_t c)
                                 HWY_ATTR { io.store(exp_checked(io.d, io.load(log_g + c)), g.data() + c); });
  for_each_block<T>(0, p.values, [&]<int V>(const auto& io, int64_t column) HWY_ATTR {
    const Tag<T> d;
    hn::Vec<Tag<T>> value[V], sum[V];
    for (int n = 0; n < V; ++n) value[n] = io.load(v + column + n * kLanes<T>), sum[n] = hn::Zero(d);
    for (int64_t c = 0; c < p.keys; ++c) {
      const auto gate = hn::Set(d, g[c]), key = hn::Set(d, k[c]), query = hn::Set(d, q[c] * p.scale);
      HWY_UNROLL(4)
      for (int n = 0; n < V; ++n) {
        const int64_t at = c * p.values + column + n * kLanes<T>;
        const auto state = hn::MulAdd(gate, io.load(before + at), hn::Mul(key, value[n]));
        io.store(state, after + at);
        sum[n] = hn::MulAdd(query, state, sum[n]);
      }
    }
    for (int n = 0; n < V; ++n) io.store(sum[n], o.at(b, 0, h) + column + n * kLanes<T>);
  });
}

/// Heads [begin, end), in one thread's memory.
template <class T>
void hgrn2_forward_heads(const Hgrn2Params<T>& p, const HeadRows<T>& o, T* last, T* kept, int64_t begin, int64_t end) {
  const FlushDenormals flush;
  if (p.length == 1) {
    for (int64_t head = begin; head < end; ++head) hgrn2_step(p, o, last, head);
    return;
  }
  Hgrn2Chunk<T> x(p);
  for (int64_t head = begin; head < end; ++head) hgrn2_forward_head(x, o, last, kept, head);
}
template <class T>
void hgrn2_backward_heads(const Hgrn2Params<T>& p, const T* kept, const Hgrn2Gradients<T>& g, int64_t begin,
                          int64_t end) {
  const FlushDenormals flush;
  Hgrn2Chunk<T> x(p);
  Hgrn2ChunkGradients<T> y(x);
  for (int64_t head = begin; head < end; ++head) hgrn2_backward_head(y, kept, g, head);
}

void forward_f32(const Hgrn2Params<float>& p, const HeadRows<float>& o, float* last, float* kept, int64_t begin,
                 int64_t end) {
  hgrn2_forward_heads(p, o, last, kept, begin, end);
}
void forward_f64(const Hgrn2Params<double>& p, const HeadRows<double>& o, double* last, double* kept, int64_t begin,
                 int64_t end) {
  hgrn2_forward_heads(p, o, last, kept, begin, end);
}
void backward_f32(const Hgrn2Params<float>& p, const float* kept, const Hgrn2Gradients<float>& g, int64_t begin,
                  int64_t end) {
  hgrn2_backward_heads(p, kept, g, begin, end);
}
void backward_f64(const Hgrn2Params<double>& p, const double* kept, const Hgrn2Gradients<double>& g, int64_t begin,
                  int64_t end) {
  hgrn2_backward_heads(p, kept, g, begin, end);
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

template <>
void hgrn2(const Hgrn2Params<float>& p, const HeadRows<float>& o, float* last, float* kept) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_f32);
  parallel_pieces(p.batch * p.heads, 1,
                  [&](int64_t begin, int64_t end, int64_t) { run(p, o, last, kept, begin, end); });
}
template <>
void hgrn2(const Hgrn2Params<double>& p, const HeadRows<double>& o, double* last, double* kept) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_f64);
  parallel_pieces(p.batch * p.heads, 1,
                  [&](int64_t begin, int64_t end, int64_t) { run(p, o, last, kept, begin, end); });
}
template <>
void hgrn2_backward(const Hgrn2Params<float>& p, const float* kept, const Hgrn2Gradients<float>& g) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward_f32);
  parallel_pieces(p.batch * p.heads, 1, [&](int64_t begin, int64_t end, int64_t) { run(p, kept, g, begin, end); });
}
template <>
void hgrn2_backward(const Hgrn2Params<double>& p, const double* kept, const Hgrn2Gradients<double>& g) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward_f64);
  parallel_pieces(p.batch * p.heads, 1, [&](int64_t begin, int64_t end, int64_t) { run(p, kept, g, begin, end); });
}

}  // namespace fox::kernels
#endif
