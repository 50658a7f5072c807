// The state space model of Mamba-2, chunk after chunk of 64 tokens; a task is some heads of a row, which share the
// products of b and c.
//
// Within a chunk the weight of token j for token i is (b_j·c_i) Π_{j < l <= i} g_l, g the decays of the head: products
// of the decays between the two tokens and of nothing else, so that neither a decay of 0 nor a strong one beside weak
// ones costs digits; and no exponential but one a token. Gradients of a log decay are what flows across it, added up as
// such and never as a difference of what came from before and after.
//
// States are (N, P) here, as the products read and write them. Matrices of token pairs are kept transposed, a row j an
// earlier token, a column i a later one: matrix_tile-inl.h says for what.
#include "kernels/cpu/mamba2.h"

#include <algorithm>

#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mamba2.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/chunk_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {
namespace {

/// One chunk of one row, and of one of its heads at a time. Widths are padded to vectors.
template <class T>
struct Mamba2Chunk {
  const Mamba2Params<T>& p;
  const int64_t states, width;  // N and P, padded
  int64_t rows = 0;
  T *b, *c;                         // (64, states)
  T* transposed;                    // (states, 64)
  T* scores;                        // (64, 64): b_j·c_i, j <= i
  T *x, *dx, *scaled;               // (64, width): of a head; dt x; that times the decays behind the token
  T* weights;                       // (64, 64): of a head
  T *dt, *decay, *prefix, *suffix;  // (64,): decays of a token; from the chunk's start through it; behind it
  T total = 0;                      // what the chunk leaves of the state before
  hwy::AlignedFreeUniquePtr<T[]> memory;

  explicit Mamba2Chunk(const Mamba2Params<T>& params)
      : p(params), states(padded_dim<T>(params.states)), width(padded_dim<T>(params.width)) {
    memory = allocate_arrays<T>({{&b, kChunk * states},
                                 {&c, kChunk * states},
                                 {&transposed, kChunk * states},
                                 {&scores, kChunk * kChunk},
                                 {&x, kChunk * width},
                                 {&dx, kChunk * width},
                                 {&scaled, kChunk * width},
                                 {&weights, kChunk * kChunk},
                                 {&dt, kChunk},
                                 {&decay, kChunk},
                                 {&prefix, kChunk},
                                 {&suffix, kChunk}});
  }
  int64_t state_size() const { return p.states * width; }

  void load_b(int64_t row, int64_t chunk) {
    rows = std::min(kChunk, p.length - chunk * kChunk);
    pack_rows(p.b.at(row, chunk * kChunk, 0), p.b.time, rows, p.states, b);
  }
  void load_c(int64_t row, int64_t chunk) {
    pack_rows(p.c.at(row, chunk * kChunk, 0), p.c.time, rows, p.states, c);
    transpose(c, states, rows, p.states, transposed, kChunk);
    multiply<false>(
        Product<T>{b, states, transposed, kChunk, scores, kChunk, rows, rows, p.states, false, Triangle::kOutput});
    keep_future(scores, rows, 0);
  }

  void load_head(int64_t row, int64_t head, int64_t chunk) {
    const int64_t t = chunk * kChunk;
    const Tag<T> d;
    pack_rows(p.x.at(row, t, head), p.x.time, rows, p.width, x);
    for (int64_t i = 0; i < rows; ++i) {
      dt[i] = *p.dt.at(row, t + i, head);
      decay[i] = *p.log_decay.at(row, t + i, head);
    }
    for (int64_t i = 0; i < rows; i += kLanes<T>) hn::Store(exp_checked(d, hn::Load(d, decay + i)), d, decay + i);
    T product = 1;
    for (int64_t i = 0; i < rows; ++i) prefix[i] = product *= decay[i];
    total = product;
    product = 1;
    for (int64_t j = rows - 1; j >= 0; product *= decay[j--]) suffix[j] = product;
    scale_rows(dt, x, rows, width, dx);
    scale_rows(suffix, dx, rows, width, scaled);
  }

  /// Calls f(j, i, between) for vectors of later tokens i, `between` the decays between j and each of them; 0 for i <
  /// j.
  template <class F>
  HWY_INLINE void for_each_decay(const F& f) const {
    const Tag<T> d;
    for (int64_t i = 0; i < rows; i += kLanes<T>) {
      const auto column = hn::Iota(d, static_cast<T>(i));
      auto between = hn::Zero(d);
      for (int64_t j = rows - 1; j >= 0; --j) {
        if (j + 1 < rows) between = hn::Mul(between, hn::Set(d, decay[j + 1]));
        between = hn::IfThenElse(hn::Eq(column, hn::Set(d, static_cast<T>(j))), hn::Set(d, T(1)), between);
        f(j, i, between);
      }
    }
  }
  HWY_NOINLINE void compute_weights() {
    const Tag<T> d;
    for_each_decay([&](int64_t j, int64_t i, auto between) HWY_ATTR {
      const int64_t at = j * kChunk + i;
      hn::Store(hn::Mul(between, hn::Load(d, scores + at)), d, weights + at);
    });
  }

  /// state (states, width) behind the chunk.
  void advance(T* state) const {
    const Tag<T> d;
    const auto left = hn::Set(d, total);
    for (int64_t e = 0; e < state_size(); e += kLanes<T>)
      hn::Store(hn::Mul(left, hn::Load(d, state + e)), d, state + e);
    multiply<true>(Product<T>{b, states, scaled, width, state, width, p.states, p.width, rows, /*add=*/true});
  }
};

/// state (N, padded P) from (P, N), and back.
template <class T>
void state_from(const T* from, const Mamba2Chunk<T>& x, T* state) {
  for (int64_t n = 0; n < x.p.states; ++n) {
    for (int64_t i = 0; i < x.p.width; ++i) state[n * x.width + i] = from[i * x.p.states + n];
  }
}
template <class T>
void state_to(const T* state, const Mamba2Chunk<T>& x, T* to) {
  for (int64_t n = 0; n < x.p.states; ++n) {
    for (int64_t i = 0; i < x.p.width; ++i) to[i * x.p.states + n] = state[n * x.width + i];
  }
}

/// Some heads of one row.
struct HeadGroup {
  int64_t row, begin, end;
  int64_t count() const { return end - begin; }
};

/// Where the state before a segment of chunks is kept, from the second one on.
template <class T>
int64_t kept_at(const Mamba2Params<T>& p, int64_t segment, int64_t row, int64_t head) {
  return (((segment - 1) * p.batch + row) * p.heads + head) * p.state_size();
}

/// One token: the state is read and written once, as it lies.
template <class T>
void mamba2_step(const Mamba2Params<T>& p, const HeadRows<T>& y, T* last, int64_t row, int64_t head) {
  const Tag<T> d;
  const T *x = p.x.at(row, 0, head), *b = p.b.at(row, 0, 0), *c = p.c.at(row, 0, 0);
  const T dt = *p.dt.at(row, 0, head);
  const auto decay = exp_checked(d, hn::Set(d, *p.log_decay.at(row, 0, head)));
  const int64_t at = (row * p.heads + head) * p.state_size();
  for (int64_t i = 0; i < p.width; ++i) {
    const auto written = hn::Set(d, dt * x[i]);
    auto sum = hn::Zero(d);
    for_each_vector<T>(p.states, [&](const auto& io, int64_t n) HWY_ATTR {
      const auto left = hn::Mul(decay, io.load(p.first + at + i * p.states + n));
      const auto state = hn::MulAdd(written, io.load(b + n), left);
      io.store(state, last + at + i * p.states + n);
      sum = hn::MulAdd(state, io.load(c + n), sum);
    });
    y.at(row, 0, head)[i] = sum_of_lanes(d, sum) + p.d[head] * x[i];
  }
}

template <class T>
void mamba2_forward_group(const Mamba2Params<T>& p, const HeadRows<T>& y, T* last, T* kept, const HeadGroup& group) {
  const FlushDenormals flush;
  if (p.length == 1) {
    for (int64_t head = group.begin; head < group.end; ++head) mamba2_step(p, y, last, group.row, head);
    return;
  }
  Mamba2Chunk<T> x(p);
  const Tag<T> d;
  T *state, *read, *out;
  const auto memory = allocate_arrays<T>(
      {{&state, group.count() * x.state_size()}, {&read, kChunk * x.width}, {&out, kChunk * x.width}});
  const auto state_of = [&](int64_t head) { return state + (head - group.begin) * x.state_size(); };
  for (int64_t head = group.begin; head < group.end; ++head) {
    state_from(p.first + (group.row * p.heads + head) * p.state_size(), x, state_of(head));
  }
  for (int64_t chunk = 0; chunk < chunks_of(p.length); ++chunk) {
    x.load_b(group.row, chunk);
    x.load_c(group.row, chunk);
    for (int64_t head = group.begin; head < group.end; ++head) {
      T* own = state_of(head);
      if (chunk > 0 && chunk % kKeptEvery == 0) {
        unpack_rows(own, p.states, p.width, T(1), kept + kept_at(p, chunk / kKeptEvery, group.row, head), p.width);
      }
      x.load_head(group.row, head, chunk);
      x.compute_weights();
      multiply<false>(Product<T>{x.c, x.states, own, x.width, read, x.width, x.rows, p.width, p.states});
      const auto skip = hn::Set(d, p.d[head]);
      for (int64_t i = 0; i < x.rows; ++i) {
        const auto left = hn::Set(d, x.prefix[i]);
        for (int64_t e = i * x.width; e < (i + 1) * x.width; e += kLanes<T>) {
          const auto skipped = hn::Mul(skip, hn::Load(d, x.x + e));
          hn::Store(hn::MulAdd(left, hn::Load(d, read + e), skipped), d, out + e);
        }
      }
      multiply<true>(Product<T>{x.weights, kChunk, x.dx, x.width, out, x.width, x.rows, p.width, x.rows, true,
                                Triangle::kDepthBelow});
      unpack_rows(out, x.rows, p.width, T(1), y.at(group.row, chunk * kChunk, head), y.time);
      x.advance(own);
    }
  }
  for (int64_t head = group.begin; head < group.end; ++head) {
    state_to(state_of(head), x, last + (group.row * p.heads + head) * p.state_size());
  }
}

// ------------------------------------------------------------------------------------------------------ backward

/// A chunk and its gradients: those of b, c and their scores summed over heads, the others of one head.
template <class T>
struct Mamba2ChunkGradients {
  Mamba2Chunk<T>& x;
  T *db, *dc, *db_t, *dc_t;                  // (64, states), (states, 64)
  T* own_t;                                  // (states, 64)
  T* dscores;                                // (64, 64), 0 for i < j
  T *dy, *ddx, *left;                        // (64, width)
  T* values_t;                               // (width, 64)
  T* dweights;                               // (64, 64); for i < j anything
  T *dlog_decay, *ddt, *from, *to, *across;  // (64,): flows that start at, end at, cross a token
  hwy::AlignedFreeUniquePtr<T[]> memory;

  explicit Mamba2ChunkGradients(Mamba2Chunk<T>& chunk) : x(chunk) {
    const int64_t of_states = kChunk * x.states, of_width = kChunk * x.width, of_pairs = kChunk * kChunk;
    memory = allocate_arrays<T>({{&db, of_states},
                                 {&dc, of_states},
                                 {&db_t, of_states},
                                 {&dc_t, of_states},
                                 {&own_t, of_states},
                                 {&dscores, of_pairs},
                                 {&dy, of_width},
                                 {&ddx, of_width},
                                 {&left, of_width},
                                 {&values_t, of_width},
                                 {&dweights, of_pairs},
                                 {&dlog_decay, kChunk},
                                 {&ddt, kChunk},
                                 {&from, kChunk},
                                 {&to, kChunk},
                                 {&across, kChunk}});
  }

  void start_chunk() {
    for (T* sum : {db_t, dc_t}) std::fill_n(sum, x.p.states * kChunk, T(0));
    std::fill_n(dscores, kChunk * kChunk, T(0));
  }

  /// Of a head, given those of its output in dy. dstate: of the state behind the chunk, then of the one before.
  /// Returns that of d.
  T add_head(int64_t head, const T* state, T* dstate) {
    const int64_t rows = x.rows, width = x.width, N = x.p.states, P = x.p.width;
    x.compute_weights();
    // By way of the state behind: what the tokens leave in it, and what is left of the one before.
    multiply<false>(Product<T>{x.b, x.states, dstate, width, ddx, width, rows, P, N});
    scale_rows(x.suffix, ddx, rows, width, ddx);
    for (int64_t j = 0; j < rows; ++j) from[j] = dot(ddx + j * width, x.dx + j * width, width);
    const T through = x.total * dot(state, dstate, x.state_size());
    transpose(x.scaled, width, rows, P, values_t, kChunk);
    multiply<false>(Product<T>{dstate, width, values_t, kChunk, db_t, kChunk, N, rows, P, true});
    // By way of the state before.
    scale_rows(x.prefix, dy, rows, width, left);
    transpose(left, width, rows, P, values_t, kChunk);
    multiply<false>(Product<T>{state, width, values_t, kChunk, own_t, kChunk, N, rows, P});
    add_reads();
    scale(x.total, dstate, x.state_size());
    multiply<true>(Product<T>{x.c, x.states, left, width, dstate, width, N, P, rows, true});
    // Within the chunk.
    multiply<false>(Product<T>{x.weights, kChunk, dy, width, ddx, width, rows, P, rows, true, Triangle::kDepthAbove});
    transpose(dy, width, rows, P, values_t, kChunk);
    multiply<false>(
        Product<T>{x.dx, width, values_t, kChunk, dweights, kChunk, rows, rows, P, false, Triangle::kOutput});
    add_scores();
    add_flows(through);
    return finish(x.p.d[head]);
  }

  /// db and dc of all heads that were added.
  void finish_chunk() {
    const int64_t rows = x.rows, states = x.states, N = x.p.states;
    transpose(db_t, kChunk, N, rows, db, states);
    transpose(dc_t, kChunk, N, rows, dc, states);
    multiply<false>(Product<T>{dscores, kChunk, x.c, states, db, states, rows, N, rows, true, Triangle::kDepthAbove});
    multiply<true>(Product<T>{dscores, kChunk, x.b, states, dc, states, rows, N, rows, true, Triangle::kDepthBelow});
  }

 private:
  /// dc of this head joins that of the others; what each token reads of the state before is the flow up to it.
  HWY_NOINLINE void add_reads() {
    const Tag<T> d;
    for (int64_t i = 0; i < x.rows; i += kLanes<T>) {
      auto flow = hn::Zero(d);
      for (int64_t n = 0; n < x.p.states; ++n) {
        const int64_t at = n * kChunk + i;
        const auto own = hn::Load(d, own_t + at);
        flow = hn::MulAdd(own, hn::Load(d, x.transposed + at), flow);
        hn::Store(hn::Add(own, hn::Load(d, dc_t + at)), d, dc_t + at);
      }
      hn::Store(flow, d, to + i);
    }
  }

  /// dscores, and in dweights what flows from token to token.
  HWY_NOINLINE void add_scores() {
    const Tag<T> d;
    x.for_each_decay([&](int64_t j, int64_t i, auto between) HWY_ATTR {
      const int64_t at = j * kChunk + i;
      const auto dscore = hn::Mul(between, hn::Load(d, dweights + at));
      hn::Store(hn::Add(dscore, hn::Load(d, dscores + at)), d, dscores + at);
      hn::Store(hn::Mul(dscore, hn::Load(d, x.scores + at)), d, dweights + at);
    });
  }

  /// Across the decay of token l goes what starts before l and ends at l or behind.
  HWY_NOINLINE void add_flows(T through) {
    const Tag<T> d;
    std::fill_n(across, kChunk, T(0));
    for (int64_t l = 0; l < x.rows; ++l) {  // across[i]: from all tokens before l to i
      auto sum = hn::Zero(d);
      for (int64_t i = l / kLanes<T> * kLanes<T>; i < x.rows; i += kLanes<T>) {
        const auto behind = hn::Ge(hn::Iota(d, static_cast<T>(i)), hn::Set(d, static_cast<T>(l)));
        const auto before = hn::Load(d, across + i);
        sum = hn::Add(sum, hn::IfThenElseZero(behind, before));
        hn::Store(hn::Add(before, hn::Load(d, dweights + l * kChunk + i)), d, across + i);
      }
      dlog_decay[l] = through + hn::GetLane(hn::SumOfLanes(d, sum));
      through += from[l];
    }
    T ends = 0;
    for (int64_t l = x.rows - 1; l >= 0; --l) dlog_decay[l] += ends += to[l];
  }

  /// ddx becomes the gradient of x; ddt; returns that of d.
  T finish(T skip) {
    const Tag<T> d;
    auto dskip = hn::Zero(d);
    for (int64_t i = 0; i < x.rows; ++i) {
      ddt[i] = dot(ddx + i * x.width, x.x + i * x.width, x.width);
      const auto by = hn::Set(d, x.dt[i]), straight = hn::Set(d, skip);
      auto of_token = hn::Zero(d);  // rounding errors of sums of sums grow slower than those of one long sum
      for (int64_t e = i * x.width; e < (i + 1) * x.width; e += kLanes<T>) {
        const auto grad = hn::Load(d, dy + e);
        of_token = hn::MulAdd(grad, hn::Load(d, x.x + e), of_token);
        hn::Store(hn::MulAdd(by, hn::Load(d, ddx + e), hn::Mul(straight, grad)), d, ddx + e);
      }
      dskip = hn::Add(dskip, of_token);
    }
    return hn::GetLane(hn::SumOfLanes(d, dskip));
  }
};

template <class T>
struct Mamba2Backward {
  const Mamba2Params<T>& p;
  const Mamba2Gradients<T>& grads;
  const HeadGroup& group;
  const int64_t task;  // of its row
  Mamba2Chunk<T> x{p};
  Mamba2ChunkGradients<T> y{x};
  T *dstates = nullptr, *states = nullptr;  // (heads of the group), (kKeptEvery, heads of the group)
  hwy::AlignedFreeUniquePtr<T[]> memory = allocate_arrays<T>(
      {{&dstates, group.count() * x.state_size()}, {&states, kKeptEvery* group.count() * x.state_size()}});

  T* dstate(int64_t head) { return dstates + (head - group.begin) * x.state_size(); }
  T* state(int64_t n, int64_t head) { return states + (n * group.count() + head - group.begin) * x.state_size(); }

  void run(const T* kept) {
    for (int64_t head = group.begin; head < group.end; ++head) {
      const int64_t number = group.row * p.heads + head;
      state_from(grads.dlast + number * p.state_size(), x, dstate(head));
      grads.dd[number] = 0;
    }
    const int64_t chunks = chunks_of(p.length);
    for (int64_t segment = kept_states(chunks); segment >= 0; --segment) {
      const int64_t begin = segment * kKeptEvery, count = std::min(kKeptEvery, chunks - begin);
      states_of_segment(kept, segment, count);
      for (int64_t n = count - 1; n >= 0; --n) chunk_gradients(begin + n, n);
    }
    for (int64_t head = group.begin; head < group.end; ++head) {
      state_to(dstate(head), x, grads.dfirst + (group.row * p.heads + head) * p.state_size());
    }
  }

 private:
  void states_of_segment(const T* kept, int64_t segment, int64_t count) {
    for (int64_t head = group.begin; head < group.end; ++head) {
      if (segment == 0) {
        state_from(p.first + (group.row * p.heads + head) * p.state_size(), x, state(0, head));
      } else {
        pack_rows(kept + kept_at(p, segment, group.row, head), p.width, p.states, p.width, state(0, head));
      }
    }
    for (int64_t n = 0; n + 1 < count; ++n) {
      const int64_t chunk = segment * kKeptEvery + n;
      x.load_b(group.row, chunk);
      for (int64_t head = group.begin; head < group.end; ++head) {
        x.load_head(group.row, head, chunk);
        std::copy_n(state(n, head), x.state_size(), state(n + 1, head));
        x.advance(state(n + 1, head));
      }
    }
  }

  void chunk_gradients(int64_t chunk, int64_t n) {
    const int64_t t = chunk * kChunk, row = group.row;
    x.load_b(row, chunk);
    x.load_c(row, chunk);
    y.start_chunk();
    for (int64_t head = group.begin; head < group.end; ++head) {
      x.load_head(row, head, chunk);
      pack_rows(grads.dy.at(row, t, head), grads.dy.time, x.rows, p.width, y.dy);
      grads.dd[row * p.heads + head] += y.add_head(head, state(n, head), dstate(head));
      unpack_rows(y.ddx, x.rows, p.width, T(1), grads.dx.at(row, t, head), grads.dx.time);
      for (int64_t i = 0; i < x.rows; ++i) {
        *grads.ddt.at(row, t + i, head) = y.ddt[i];
        *grads.dlog_decay.at(row, t + i, head) = y.dlog_decay[i];
      }
    }
    y.finish_chunk();
    unpack_rows(y.db, x.rows, p.states, T(1), grads.db.at(row, t, task), grads.db.time);
    unpack_rows(y.dc, x.rows, p.states, T(1), grads.dc.at(row, t, task), grads.dc.time);
  }
};

void forward_f32(const Mamba2Params<float>& p, const HeadRows<float>& y, float* last, float* kept, int64_t row,
                 int64_t begin, int64_t end) {
  mamba2_forward_group(p, y, last, kept, {row, begin, end});
}
void forward_f64(const Mamba2Params<double>& p, const HeadRows<double>& y, double* last, double* kept, int64_t row,
                 int64_t begin, int64_t end) {
  mamba2_forward_group(p, y, last, kept, {row, begin, end});
}
void backward_f32(const Mamba2Params<float>& p, const float* kept, const Mamba2Gradients<float>& g, int64_t row,
                  int64_t begin, int64_t end, int64_t task) {
  const FlushDenormals flush;
  Mamba2Backward<float>{p, g, {row, begin, end}, task}.run(kept);
}
void backward_f64(const Mamba2Params<double>& p, const double* kept, const Mamba2Gradients<double>& g, int64_t row,
                  int64_t begin, int64_t end, int64_t task) {
  const FlushDenormals flush;
  Mamba2Backward<double>{p, g, {row, begin, end}, task}.run(kept);
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

/// Calls body(row, first head, end, number of the task within its row).
template <class Body>
void for_each_task(int64_t batch, int64_t heads, const Body& body) {
  const int64_t tasks = mamba2_tasks(batch, heads);
  parallel_pieces(batch * tasks, 1, [&](int64_t first, int64_t last, int64_t) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t task = item % tasks;
      body(item / tasks, heads * task / tasks, heads * (task + 1) / tasks, task);
    }
  });
}

}  // namespace

int64_t mamba2_tasks(int64_t batch, int64_t heads) {
  constexpr int64_t kMostHeads = 8;  // whose states fit in a core's cache
  const int64_t threads = num_pieces(batch * heads, 1);
  return std::max((threads + batch - 1) / batch, (heads + kMostHeads - 1) / kMostHeads);
}

template <>
void mamba2(const Mamba2Params<float>& p, const HeadRows<float>& y, float* last, float* kept) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_f32);
  for_each_task(p.batch, p.heads,
                [&](int64_t row, int64_t begin, int64_t end, int64_t) { run(p, y, last, kept, row, begin, end); });
}
template <>
void mamba2(const Mamba2Params<double>& p, const HeadRows<double>& y, double* last, double* kept) {
  const auto run = HWY_DYNAMIC_DISPATCH(forward_f64);
  for_each_task(p.batch, p.heads,
                [&](int64_t row, int64_t begin, int64_t end, int64_t) { run(p, y, last, kept, row, begin, end); });
}
template <>
void mamba2_backward(const Mamba2Params<float>& p, const float* kept, const Mamba2Gradients<float>& g) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward_f32);
  for_each_task(p.batch, p.heads,
                [&](int64_t row, int64_t begin, int64_t end, int64_t task) { run(p, kept, g, row, begin, end, task); });
}
template <>
void mamba2_backward(const Mamba2Params<double>& p, const double* kept, const Mamba2Gradients<double>& g) {
  const auto run = HWY_DYNAMIC_DISPATCH(backward_f64);
  for_each_task(p.batch, p.heads,
                [&](int64_t row, int64_t begin, int64_t end, int64_t task) { run(p, kept, g, row, begin, end, task); });
}

}  // namespace fox::kernels
#endif
