// The selective scan, some vectors of channels at a time: state n of a vector's channels is one vector, so that neither
// the outputs nor the decays need sums over lanes; only the gradients of b and c, which belong to all channels, do.
// Four vectors together share those sums, the reads of b and c, and the pages that a token's row of channels lies on.
// Forward, a block of channels runs through time once. Backward, chunk after chunk from the end: the chunk's states
// again from the kept one, then in reverse.
#include "kernels/cpu/mamba.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mamba.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// A block of V vectors of channels: `io` loads and stores those that exist. Arrays (N, V, L) hold state n of every
/// lane.
template <int V, class T, class Io>
struct Block {
  using D = decltype(Io::d);
  using Vector = hn::Vec<D>;
  const MambaParams<T>& p;
  const Io& io;
  const int64_t i, lanes, count;  // first channel; lanes of a vector; how many channels exist

  Block(const MambaParams<T>& params, const Io& access, int64_t first)
      : p(params),
        io(access),
        i(first),
        lanes(static_cast<int64_t>(hn::Lanes(access.d))),
        count(std::min(V * lanes, params.channels - first)) {}

  int64_t width() const { return V * lanes; }
  int64_t size() const { return p.states * width(); }

  /// (I, N) rows of these channels, times `factor`, as (N, V, L), and back.
  void gather(const T* from, T* to, T factor = 1) const {
    std::fill(to, to + size(), T(0));
    for (int64_t l = 0; l < count; ++l) {
      for (int64_t n = 0; n < p.states; ++n) to[n * width() + l] = factor * from[(i + l) * p.states + n];
    }
  }
  void scatter(const T* from, T* to) const {
    for (int64_t l = 0; l < count; ++l) {
      for (int64_t n = 0; n < p.states; ++n) to[(i + l) * p.states + n] = from[n * width() + l];
    }
  }
  /// Channels of a token's row, or of a tensor (I,).
  HWY_INLINE void load(const T* x, int64_t token, Vector (&to)[V]) const {
    for (int v = 0; v < V; ++v) to[v] = io.load(x + token * p.channels + i + v * lanes);
  }
  HWY_INLINE void store(const Vector (&from)[V], T* x, int64_t token) const {
    for (int v = 0; v < V; ++v) io.store(from[v], x + token * p.channels + i + v * lanes);
  }
  HWY_INLINE Vector state(const T* h, int64_t n, int v) const { return hn::LoadU(io.d, h + n * width() + v * lanes); }
  HWY_INLINE void put_state(Vector x, T* h, int64_t n, int v) const {
    hn::StoreU(x, io.d, h + n * width() + v * lanes);
  }
  bool fresh(int64_t t) const { return p.starts != nullptr && p.starts[t]; }
};

// Decay rates are kept in base 2: exp(dt a) = 2^(dt a log2 e).
constexpr double kMambaLog2e = 1.4426950408889634, kMambaLn2 = 0.6931471805599453;

template <int V, class T, class Io>
void forward_block(const MambaParams<T>& p, const Io& io, int64_t i, T* y, T* last, T* kept) {
  const Block<V, T, Io> block(p, io, i);
  using Vector = typename Block<V, T, Io>::Vector;
  const auto d = io.d;
  const int64_t N = p.states, all = p.batch * p.channels * N;
  std::vector<T> a(block.size()), h(block.size());
  block.gather(p.a, a.data(), static_cast<T>(kMambaLog2e));
  Vector skip[V], x[V], dt[V], sum[V];
  block.load(p.d, 0, skip);
  for (int64_t row = 0; row < p.batch; ++row) {
    const int64_t own = row * p.channels * N;
    block.gather(p.first + own, h.data());
    for (int64_t t = 0; t < p.length; ++t) {
      if (t > 0 && t % kMambaChunk == 0) block.scatter(h.data(), kept + (t / kMambaChunk - 1) * all + own);
      if (block.fresh(t)) std::fill(h.begin(), h.end(), T(0));
      const int64_t token = row * p.length + t;
      block.load(p.x, token, x);
      block.load(p.dt, token, dt);
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) sum[v] = hn::Mul(skip[v], x[v]), x[v] = hn::Mul(x[v], dt[v]);
      for (int64_t n = 0; n < N; ++n) {
        const auto b = hn::Set(d, p.b[token * N + n]), c = hn::Set(d, p.c[token * N + n]);
        HWY_UNROLL(4)
        for (int v = 0; v < V; ++v) {
          const auto decay = exp2(d, hn::Mul(dt[v], block.state(a.data(), n, v)));
          const auto after = hn::MulAdd(decay, block.state(h.data(), n, v), hn::Mul(x[v], b));
          block.put_state(after, h.data(), n, v);
          sum[v] = hn::MulAdd(after, c, sum[v]);
        }
      }
      block.store(sum, y, token);
    }
    block.scatter(h.data(), last + own);
  }
}

/// The backward pass of a block.
template <int V, class T, class Io>
struct BackwardBlock {
  using Vector = typename Block<V, T, Io>::Vector;
  const Block<V, T, Io> block;
  const MambaParams<T>& p;
  const MambaGradients<T>& g;
  T *db, *dc;                                // (B, T, N), added to
  std::vector<T> a, da, dh, states, decays;  // (N, V, L); states before and after each token of a chunk, their decays
  Vector skip[V], dskip[V];

  BackwardBlock(const MambaParams<T>& params, const Io& io, int64_t i, const MambaGradients<T>& grads, T* sums_b,
                T* sums_c)
      : block(params, io, i),
        p(params),
        g(grads),
        db(sums_b),
        dc(sums_c),
        a(block.size()),
        da(block.size(), T(0)),
        dh(block.size()),
        states((kMambaChunk + 1) * block.size()),
        decays(kMambaChunk * block.size()) {}

  void run(const T* kept) {
    const int64_t rows = p.channels * p.states;
    block.gather(p.a, a.data(), static_cast<T>(kMambaLog2e));
    block.load(p.d, 0, skip);
    for (auto& x : dskip) x = hn::Zero(block.io.d);
    for (int64_t row = 0; row < p.batch; ++row) {
      block.gather(g.dlast + row * rows, dh.data());
      for (int64_t chunk = mamba_chunks(p.length) - 1; chunk >= 0; --chunk) {
        const int64_t t0 = chunk * kMambaChunk, count = std::min(kMambaChunk, p.length - t0);
        block.gather(chunk == 0 ? p.first + row * rows : kept + ((chunk - 1) * p.batch + row) * rows, states.data());
        for (int64_t t = 0; t < count; ++t) states_of_token(row * p.length + t0 + t, t, block.fresh(t0 + t));
        for (int64_t t = count - 1; t >= 0; --t) gradients_of_token(row * p.length + t0 + t, t);
      }
      block.scatter(dh.data(), g.dfirst + row * rows);
    }
    block.scatter(da.data(), g.da);
    block.store(dskip, g.dd, 0);
  }

 private:
  /// Decays of the chunk's token t, and the states after it.
  HWY_INLINE void states_of_token(int64_t token, int64_t t, bool fresh) {
    const auto d = block.io.d;
    T *decay_t = decays.data() + t * block.size(), *before = states.data() + t * block.size();
    Vector x[V], dt[V];
    block.load(p.x, token, x);
    block.load(p.dt, token, dt);
    HWY_UNROLL(4)
    for (int v = 0; v < V; ++v) x[v] = hn::Mul(x[v], dt[v]);
    for (int64_t n = 0; n < p.states; ++n) {
      const auto b = hn::Set(d, p.b[token * p.states + n]);
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const auto decay = fresh ? hn::Zero(d) : exp2(d, hn::Mul(dt[v], block.state(a.data(), n, v)));
        block.put_state(decay, decay_t, n, v);
        block.put_state(hn::MulAdd(decay, block.state(before, n, v), hn::Mul(x[v], b)), before + block.size(), n, v);
      }
    }
  }

  HWY_INLINE void gradients_of_token(int64_t token, int64_t t) {
    const auto d = block.io.d;
    const int64_t N = p.states;
    const T *decay_t = decays.data() + t * block.size(), *before_t = states.data() + t * block.size();
    Vector x[V], dt[V], dy[V], written[V], through_b[V], through_decay[V];
    block.load(p.x, token, x);
    block.load(p.dt, token, dt);
    block.load(g.dy, token, dy);
    HWY_UNROLL(4)
    for (int v = 0; v < V; ++v) {
      written[v] = hn::Mul(x[v], dt[v]);
      through_b[v] = through_decay[v] = hn::Zero(d);
    }
    for (int64_t n = 0; n < N; ++n) {
      const auto b = hn::Set(d, p.b[token * N + n]), c = hn::Set(d, p.c[token * N + n]);
      auto sum_b = hn::Zero(d), sum_c = hn::Zero(d);
      HWY_UNROLL(4)
      for (int v = 0; v < V; ++v) {
        const auto decay = block.state(decay_t, n, v), dh_n = hn::MulAdd(dy[v], c, block.state(dh.data(), n, v));
        const auto left = hn::Mul(decay, dh_n), flow = hn::Mul(left, block.state(before_t, n, v));
        through_b[v] = hn::MulAdd(dh_n, b, through_b[v]);
        through_decay[v] = hn::MulAdd(block.state(a.data(), n, v), flow, through_decay[v]);
        block.put_state(hn::MulAdd(dt[v], flow, block.state(da.data(), n, v)), da.data(), n, v);
        sum_b = hn::MulAdd(written[v], dh_n, sum_b);
        sum_c = hn::MulAdd(dy[v], block.state(before_t + block.size(), n, v), sum_c);
        block.put_state(left, dh.data(), n, v);
      }
      db[token * N + n] += sum_of_lanes(d, sum_b);
      dc[token * N + n] += sum_of_lanes(d, sum_c);
    }
    const auto ln2 = hn::Set(d, static_cast<T>(kMambaLn2));
    HWY_UNROLL(4)
    for (int v = 0; v < V; ++v) {
      dskip[v] = hn::MulAdd(x[v], dy[v], dskip[v]);
      dy[v] = hn::MulAdd(dt[v], through_b[v], hn::Mul(skip[v], dy[v]));
      x[v] = hn::MulAdd(x[v], through_b[v], hn::Mul(ln2, through_decay[v]));
    }
    block.store(dy, g.dx, token);
    block.store(x, g.ddt, token);
  }
};

/// One token: no state is turned round for it. Channels [begin, end) of all rows.
template <class T>
void step_channels(const MambaParams<T>& p, int64_t begin, int64_t end, T* y, T* last) {
  for (int64_t row = 0; row < p.batch; ++row) {
    const T *b = p.b + row * p.states, *c = p.c + row * p.states;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t at = row * p.channels + i;
      const hn::ScalableTag<T> d;
      const auto rate = hn::Set(d, p.dt[at] * static_cast<T>(kMambaLog2e)), written = hn::Set(d, p.dt[at] * p.x[at]);
      auto sum = hn::Zero(d);
      for_each_vector<T>(p.states, [&](const auto& io, int64_t n) HWY_ATTR {
        const auto decay = exp2(d, hn::Mul(rate, io.load(p.a + i * p.states + n)));
        const auto left = hn::Mul(decay, io.load(p.first + at * p.states + n));
        const auto state = hn::MulAdd(written, io.load(b + n), left);
        io.store(state, last + at * p.states + n);
        sum = hn::MulAdd(state, io.load(c + n), sum);
      });
      y[at] = sum_of_lanes(d, sum) + p.d[i] * p.x[at];
    }
  }
}

template <class T>
void forward_channels(const MambaParams<T>& p, int64_t begin, int64_t end, T* y, T* last, T* kept) {
  const FlushDenormals flush;
  if (p.length == 1 && p.starts == nullptr) return step_channels(p, begin, end, y, last);
  for_each_block<T>(begin, end,
                    [&]<int V>(const auto& io, int64_t i) HWY_ATTR { forward_block<V>(p, io, i, y, last, kept); });
}
template <class T>
void backward_channels(const MambaParams<T>& p, int64_t begin, int64_t end, const T* kept, const MambaGradients<T>& g,
                       T* db, T* dc) {
  const FlushDenormals flush;
  for_each_block<T>(begin, end, [&]<int V>(const auto& io, int64_t i) HWY_ATTR {
    BackwardBlock<V, T, std::decay_t<decltype(io)>>(p, io, i, g, db, dc).run(kept);
  });
}

void forward_f32(const MambaParams<float>& p, int64_t begin, int64_t end, float* y, float* last, float* kept) {
  forward_channels(p, begin, end, y, last, kept);
}
void forward_f64(const MambaParams<double>& p, int64_t begin, int64_t end, double* y, double* last, double* kept) {
  forward_channels(p, begin, end, y, last, kept);
}
void backward_f32(const MambaParams<float>& p, int64_t begin, int64_t end, const float* kept,
                  const MambaGradients<float>& g, float* db, float* dc) {
  backward_channels(p, begin, end, kept, g, db, dc);
}
void backward_f64(const MambaParams<double>& p, int64_t begin, int64_t end, const double* kept,
                  const MambaGradients<double>& g, double* db, double* dc) {
  backward_channels(p, begin, end, kept, g, db, dc);
}

}  // namespace fox::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fox::kernels {
namespace {

HWY_EXPORT(forward_f32);
HWY_EXPORT(forward_f64);
HWY_EXPORT(backward_f32);
HWY_EXPORT(backward_f64);

void forward_piece(const MambaParams<float>& p, int64_t begin, int64_t end, float* y, float* last, float* kept) {
  HWY_DYNAMIC_DISPATCH(forward_f32)(p, begin, end, y, last, kept);
}
void forward_piece(const MambaParams<double>& p, int64_t begin, int64_t end, double* y, double* last, double* kept) {
  HWY_DYNAMIC_DISPATCH(forward_f64)(p, begin, end, y, last, kept);
}
void backward_piece(const MambaParams<float>& p, int64_t begin, int64_t end, const float* kept,
                    const MambaGradients<float>& g, float* db, float* dc) {
  HWY_DYNAMIC_DISPATCH(backward_f32)(p, begin, end, kept, g, db, dc);
}
void backward_piece(const MambaParams<double>& p, int64_t begin, int64_t end, const double* kept,
                    const MambaGradients<double>& g, double* db, double* dc) {
  HWY_DYNAMIC_DISPATCH(backward_f64)(p, begin, end, kept, g, db, dc);
}

// Threads share out blocks of this many channels: what four vectors of the widest instruction set hold.
constexpr int64_t kBlock = 64;

int64_t blocks_of(int64_t channels) { return (channels + kBlock - 1) / kBlock; }

template <class Body>
void for_each_piece(int64_t channels, const Body& body) {
  parallel_pieces(blocks_of(channels), 1, [&](int64_t begin, int64_t end, int64_t piece) {
    body(begin * kBlock, std::min(end * kBlock, channels), piece);
  });
}

}  // namespace

template <class T>
void mamba(const MambaParams<T>& p, T* y, T* last, T* kept) {
  for_each_piece(p.channels, [&](int64_t begin, int64_t end, int64_t) { forward_piece(p, begin, end, y, last, kept); });
}

template <class T>
void mamba_backward(const MambaParams<T>& p, const T* kept, const MambaGradients<T>& g) {
  const int64_t size = p.batch * p.length * p.states;
  const int64_t pieces = num_pieces(blocks_of(p.channels), 1);
  std::vector<T> sums(2 * size * pieces, T(0));  // db and dc of each thread
  for_each_piece(p.channels, [&](int64_t begin, int64_t end, int64_t piece) {
    T* own = sums.data() + 2 * size * piece;
    backward_piece(p, begin, end, kept, g, own, own + size);
  });
  for (int64_t e = 0; e < size; ++e) {
    T db = 0, dc = 0;
    for (int64_t piece = 0; piece < pieces; ++piece) {
      db += sums[2 * size * piece + e], dc += sums[2 * size * piece + size + e];
    }
    g.db[e] = db, g.dc[e] = dc;
  }
}

template void mamba(const MambaParams<float>&, float*, float*, float*);
template void mamba(const MambaParams<double>&, double*, double*, double*);
template void mamba_backward(const MambaParams<float>&, const float*, const MambaGradients<float>&);
template void mamba_backward(const MambaParams<double>&, const double*, const MambaGradients<double>&);

}  // namespace fox::kernels
#endif
