// The selective scan, a vector of channels at a time: state n of a vector's channels is one vector, so that neither the
// outputs nor the decays need sums over lanes; only the gradients of b and c, which belong to all channels, do.
// Forward, a block of channels runs through time once. Backward, chunk after chunk from the end: the chunk's states
// again from the kept one, then in reverse.
#include "kernels/cpu/mamba.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/cpu/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mamba.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fox::kernels::HWY_NAMESPACE {

/// A block of channels: `io` loads and stores those that exist. Arrays (N, L) hold state n of every lane.
template <class T, class Io>
struct Block {
  using D = decltype(Io::d);
  using V = hn::Vec<D>;
  const MambaParams<T>& p;
  const Io& io;
  const int64_t i, lanes, count;  // first channel; lanes of a vector, and how many of them exist

  Block(const MambaParams<T>& params, const Io& access, int64_t first)
      : p(params),
        io(access),
        i(first),
        lanes(static_cast<int64_t>(hn::Lanes(access.d))),
        count(std::min(lanes, params.channels - first)) {}

  /// (I, N) rows of these channels as (N, L), and back.
  void gather(const T* from, T* to) const {
    std::fill(to, to + p.states * lanes, T(0));
    for (int64_t l = 0; l < count; ++l) {
      for (int64_t n = 0; n < p.states; ++n) to[n * lanes + l] = from[(i + l) * p.states + n];
    }
  }
  void scatter(const T* from, T* to) const {
    for (int64_t l = 0; l < count; ++l) {
      for (int64_t n = 0; n < p.states; ++n) to[(i + l) * p.states + n] = from[n * lanes + l];
    }
  }
  HWY_INLINE V at(const T* x, int64_t token) const { return io.load(x + token * p.channels + i); }
  HWY_INLINE void put(V v, T* x, int64_t token) const { io.store(v, x + token * p.channels + i); }
  HWY_INLINE V state(const T* h, int64_t n) const { return hn::LoadU(io.d, h + n * lanes); }
  HWY_INLINE void put_state(V v, T* h, int64_t n) const { hn::StoreU(v, io.d, h + n * lanes); }
  HWY_INLINE V decay(V dt, const T* a, int64_t n, int64_t t) const {
    if (p.starts != nullptr && p.starts[t]) return hn::Zero(io.d);
    return exp_nonpositive(io.d, hn::Mul(dt, state(a, n)));
  }
};

template <class T, class Io>
void forward_block(const MambaParams<T>& p, const Io& io, int64_t i, T* y, T* last, T* kept) {
  const Block<T, Io> block(p, io, i);
  const int64_t N = p.states, size = p.batch * p.channels * N;
  std::vector<T> a(N * block.lanes), h(N * block.lanes);
  block.gather(p.a, a.data());
  const auto skip = io.load(p.d + i);
  for (int64_t row = 0; row < p.batch; ++row) {
    const int64_t own = row * p.channels * N;
    block.gather(p.first + own, h.data());
    for (int64_t t = 0; t < p.length; ++t) {
      if (t % kMambaChunk == 0) block.scatter(h.data(), kept + t / kMambaChunk * size + own);
      const int64_t token = row * p.length + t;
      const auto x = block.at(p.x, token), dt = block.at(p.dt, token), written = hn::Mul(x, dt);
      auto sum = hn::Mul(skip, x);
      for (int64_t n = 0; n < N; ++n) {
        const auto b = hn::Set(io.d, p.b[token * N + n]), c = hn::Set(io.d, p.c[token * N + n]);
        const auto before = block.state(h.data(), n);
        const auto after = hn::MulAdd(block.decay(dt, a.data(), n, t), before, hn::Mul(written, b));
        block.put_state(after, h.data(), n);
        sum = hn::MulAdd(after, c, sum);
      }
      block.put(sum, y, token);
    }
    block.scatter(h.data(), last + own);
  }
}

/// What the backward pass of a block keeps at hand.
template <class T>
struct Scratch {
  std::vector<T> a, da, dh, states, decays;  // (N, L); states before and after each token of a chunk, and their decays

  explicit Scratch(int64_t size)
      : a(size), da(size, T(0)), dh(size), states((kMambaChunk + 1) * size), decays(kMambaChunk * size) {}
};

template <class T, class Io>
void states_of_chunk(const Block<T, Io>& block, Scratch<T>& s, int64_t token, int64_t t0, int64_t count) {
  const auto& p = block.p;
  const int64_t size = p.states * block.lanes;
  for (int64_t t = 0; t < count; ++t) {
    const auto dt = block.at(p.dt, token + t), written = hn::Mul(block.at(p.x, token + t), dt);
    for (int64_t n = 0; n < p.states; ++n) {
      const auto b = hn::Set(block.io.d, p.b[(token + t) * p.states + n]);
      const auto decay = block.decay(dt, s.a.data(), n, t0 + t);
      block.put_state(decay, s.decays.data() + t * size, n);
      const auto before = block.state(s.states.data() + t * size, n);
      block.put_state(hn::MulAdd(decay, before, hn::Mul(written, b)), s.states.data() + (t + 1) * size, n);
    }
  }
}

/// db and dc: (B, T, N), added to.
template <class T, class Io>
void backward_block(const MambaParams<T>& p, const Io& io, int64_t i, const T* kept, const MambaGradients<T>& g, T* db,
                    T* dc) {
  const Block<T, Io> block(p, io, i);
  const int64_t N = p.states, size = N * block.lanes, rows = p.channels * N;
  Scratch<T> s(size);
  block.gather(p.a, s.a.data());
  const auto skip = io.load(p.d + i);
  auto dskip = hn::Zero(io.d);
  for (int64_t row = 0; row < p.batch; ++row) {
    block.gather(g.dlast + row * rows, s.dh.data());
    for (int64_t chunk = mamba_chunks(p.length) - 1; chunk >= 0; --chunk) {
      const int64_t t0 = chunk * kMambaChunk, count = std::min(kMambaChunk, p.length - t0);
      block.gather(kept + (chunk * p.batch + row) * rows, s.states.data());
      states_of_chunk(block, s, row * p.length + t0, t0, count);
      for (int64_t t = count - 1; t >= 0; --t) {
        const int64_t token = row * p.length + t0 + t;
        const auto x = block.at(p.x, token), dt = block.at(p.dt, token), dy = block.at(g.dy, token);
        const auto written = hn::Mul(x, dt);
        auto through_b = hn::Zero(io.d), through_decay = hn::Zero(io.d);
        for (int64_t n = 0; n < N; ++n) {
          const auto b = hn::Set(io.d, p.b[token * N + n]), c = hn::Set(io.d, p.c[token * N + n]);
          const auto decay = block.state(s.decays.data() + t * size, n);
          const auto before = block.state(s.states.data() + t * size, n);
          const auto after = block.state(s.states.data() + (t + 1) * size, n);
          const auto dh = hn::MulAdd(dy, c, block.state(s.dh.data(), n));
          const auto flow = hn::Mul(hn::Mul(decay, before), dh);  // what is left of the state before
          through_b = hn::MulAdd(dh, b, through_b);
          through_decay = hn::MulAdd(block.state(s.a.data(), n), flow, through_decay);
          block.put_state(hn::MulAdd(dt, flow, block.state(s.da.data(), n)), s.da.data(), n);
          db[token * N + n] += sum_of_lanes(io.d, hn::Mul(written, dh));
          dc[token * N + n] += sum_of_lanes(io.d, hn::Mul(dy, after));
          block.put_state(hn::Mul(decay, dh), s.dh.data(), n);
        }
        dskip = hn::MulAdd(x, dy, dskip);
        block.put(hn::MulAdd(dt, through_b, hn::Mul(skip, dy)), g.dx, token);
        block.put(hn::MulAdd(x, through_b, through_decay), g.ddt, token);
      }
    }
    block.scatter(s.dh.data(), g.dfirst + row * rows);
  }
  block.scatter(s.da.data(), g.da);
  io.store(dskip, g.dd + i);
}

/// Channels [begin, end), begin at a multiple of the vector.
template <class T, class F>
HWY_INLINE void for_each_block(int64_t begin, int64_t end, const F& f) {
  for_each_vector<T>(end - begin, [&](const auto& io, int64_t i) HWY_ATTR { f(io, begin + i); });
}

template <class T>
void forward_channels(const MambaParams<T>& p, int64_t begin, int64_t end, T* y, T* last, T* kept) {
  for_each_block<T>(begin, end, [&](const auto& io, int64_t i) HWY_ATTR { forward_block(p, io, i, y, last, kept); });
}
template <class T>
void backward_channels(const MambaParams<T>& p, int64_t begin, int64_t end, const T* kept, const MambaGradients<T>& g,
                       T* db, T* dc) {
  for_each_block<T>(begin, end, [&](const auto& io, int64_t i) HWY_ATTR { backward_block(p, io, i, kept, g, db, dc); });
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

// Threads share out blocks of this many channels: whole vectors of every instruction set.
constexpr int64_t kBlock = 16;

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
