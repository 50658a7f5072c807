// Short convolution with SiLU. A lane has a few neighbouring channels; a warp walks through a run of tokens with the
// last inputs in registers and the next few on their way, so that everything is read once but for the ends of runs.
// Backward, dx_t needs what flows into the K - 1 tokens behind it: those of the next run are computed here once more.
// The runs of a block's warps follow each other, and their sums for taps and bias meet in shared memory.
#include "kernels/cuda/short_conv.h"

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/vec.cuh"

namespace fox::cuda {
namespace {

// Fewer taps are computed as K with a reach that leaves out the first ones.
constexpr int K = kShortConvTaps, kPast = K - 1;
constexpr int kWarps = kThreads / 32;
constexpr int kForwardAhead = 8, kBackwardAhead = 4;    // tokens on their way
constexpr int kForwardBlocks = 3, kBackwardBlocks = 2;  // on a processor at once: how many registers a lane may have

/// Channels of a lane, 8 bytes (double: 16): more of them, and their sums fill the registers.
template <class T>
constexpr int kChannels = sizeof(T) == 2 ? 4 : 2;

/// How time is cut: each of the batch's rows into `count` runs of at most `length` tokens.
struct Runs {
  int count, length;
};

template <int N>
__host__ __device__ unsigned channel_blocks(int channels) {
  return static_cast<unsigned>((channels + 32 * N - 1) / (32 * N));
}

/// Makes room for the next token: what was of `back` tokens ago is of back + 1 now.
template <class A, int N>
__device__ __forceinline__ void age(A (&x)[K][N]) {
#pragma unroll
  for (int back = kPast; back > 0; --back) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[back][i] = x[back - 1][i];
  }
}

template <class T, class A, int N>
__device__ __forceinline__ void unpack(const Raw<T, N>& from, A (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = from[i];
}

/// The tokens and channels of a lane. Blocks of the same tokens are neighbours.
template <int N>
struct Place {
  int64_t batch = 0, first = 0;
  int channel, count = 0;  // count: tokens of the run
  unsigned row;            // of blocks

  template <class P>
  __device__ Place(const P& p, Runs runs) {
    const unsigned blocks = channel_blocks<N>(p.channels);
    row = blockIdx.x / blocks;
    channel = ((blockIdx.x - row * blocks) * 32 + threadIdx.x) * N;
    const int64_t run = row * static_cast<int64_t>(kWarps) + threadIdx.y;
    if (run >= p.batch * runs.count || channel >= p.channels) return;
    batch = run / runs.count;
    first = (run - batch * runs.count) * runs.length;
    count = static_cast<int>(min(static_cast<int64_t>(runs.length), p.time - first));
  }
};

/// Where the row of `batch` has the token `t` before its first in ShortConvParams::before; nullptr for one that nothing
/// reaches.
template <class T, class P>
__device__ T* before_row(T* before, const P& p, int64_t batch, int64_t t, int channel) {
  if (!before || t >= 0 || t < 1 - p.taps) return nullptr;
  return before + (batch * (p.taps - 1) + p.taps - 1 + t) * p.channels + channel;
}

/// What a lane reads. Tokens are counted from the run's first.
template <class T, class A, int N, bool kAll>
struct Lane {
  const ShortConvParams<T, A>& p;
  const T* x;  // the next token to be read
  const int64_t* reaches;
  A w[K][N];  // of the token K - 1 before, …, the token itself
  A bias[N];

  __device__ Lane(const ShortConvParams<T, A>& params, const Place<N>& at)
      : p(params),
        x(p.x + at.batch * p.x_batch + at.first * p.x_time + at.channel),
        reaches(p.reach ? p.reach + at.first : nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A* taps = p.weight + static_cast<int64_t>(at.channel + i) * p.taps;
      Vec<A, K> own;
      if (kAll || p.taps == K) {
        own.load(taps);
      } else {
#pragma unroll
        for (int k = 0; k < K; ++k) own.v[k] = k < K - p.taps ? A(0) : taps[k - (K - p.taps)];
      }
#pragma unroll
      for (int k = 0; k < K; ++k) w[k][i] = own.v[k];
      bias[i] = p.bias ? p.bias[at.channel + i] : A(0);
    }
  }

  __device__ void fetch(Raw<T, N>& token) {
    token.load(x);
    x += p.x_time;
  }
  /// The tokens before the run: [0] the last one.
  __device__ void read_past(const Place<N>& at, A (&past)[K][N]) const {
#pragma unroll
    for (int back = 1; back < K; ++back) {
      Raw<T, N> token = {};
      const T* from = at.first >= back ? x - static_cast<int64_t>(back) * p.x_time
                                       : before_row(p.before, p, at.batch, at.first - back, at.channel);
      if (from) token.load(from);
      unpack(token, past[back - 1]);
    }
  }
  /// How many tokens before token t it takes something from.
  __device__ int reach(int t) const {
    if (kAll) return kPast;
    return reaches ? static_cast<int>(min(reaches[t], static_cast<int64_t>(p.taps - 1))) : p.taps - 1;
  }
  /// The convolution, from values of the token itself, the one before, …
  __device__ void convolve(const A (&values)[K][N], int reach, A (&z)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) z[i] = bias[i] + w[kPast][i] * values[0][i];
#pragma unroll
    for (int back = 1; back < K; ++back) {
      if (!kAll && back > reach) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) z[i] += w[kPast - back][i] * values[back][i];
    }
  }
};

template <class T, class A, int N, bool kAll>
__global__ void __launch_bounds__(kThreads, kForwardBlocks) forward(ShortConvParams<T, A> p, Runs runs, T* y) {
  constexpr int kAhead = kForwardAhead;
  const Place<N> at(p, runs);
  if (at.count == 0) return;
  Lane<T, A, N, kAll> lane(p, at);
  A x[K][N];
  lane.read_past(at, x);
  Raw<T, N> next[kAhead];
#pragma unroll
  for (int ahead = 0; ahead < kAhead; ++ahead) {
    next[ahead] = {};
    if (ahead < at.count) lane.fetch(next[ahead]);
  }
  T* out = y + (at.batch * p.time + at.first) * p.channels + at.channel;
  for (int begin = 0; begin < at.count; begin += kAhead) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int t = begin + ahead;
      age(x);
      unpack(next[ahead], x[0]);
      if (t + kAhead < at.count) lane.fetch(next[ahead]);
      A z[N];
      lane.convolve(x, !kAll && t < at.count ? lane.reach(t) : kPast, z);
#pragma unroll
      for (int i = 0; i < N; ++i) z[i] *= sigmoid<T>(z[i]);
      Raw<T, N> packed;
      packed.pack(z);
      if (t < at.count) packed.store(out);
      out += p.channels;
    }
  }
}

/// Sums of a lane's channels: taps, then the bias.
template <class A, int N>
struct Sums {
  A taps[K][N], bias[N];

  /// A token's, from the gradient of its convolution and the values that it was made of.
  __device__ void add(const A (&g)[N], const A (&values)[K][N], int reach) {
#pragma unroll
    for (int i = 0; i < N; ++i) bias[i] += g[i];
#pragma unroll
    for (int back = 0; back < K; ++back) {
      if (back > reach) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) taps[kPast - back][i] += g[i] * values[back][i];
    }
  }
};

/// The sums of a block's warps, in their order, to its row of `partials`.
template <class T, class A, int N>
__device__ void leave_sums(const ShortConvParams<T, A>& p, const Place<N>& at, const Sums<A, N>& own, A* partials) {
  __shared__ A all[kWarps][(K + 1) * N][32];
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) all[threadIdx.y][k * N + i][threadIdx.x] = own.taps[k][i];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) all[threadIdx.y][K * N + i][threadIdx.x] = own.bias[i];
  __syncthreads();
  if (at.channel >= p.channels) return;
  A* row = partials + at.row * static_cast<int64_t>(p.taps + 1) * p.channels;
  for (int sum = threadIdx.y; sum < (K + 1) * N; sum += kWarps) {
    A total = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) total += all[warp][sum][threadIdx.x];
    const int tap = sum / N - (K - p.taps);
    const int64_t channel = at.channel + sum % N;
    if (tap == p.taps) {
      row[p.channels * static_cast<int64_t>(p.taps) + channel] = total;
    } else if (tap >= 0) {
      row[channel * p.taps + tap] = total;
    }
  }
}

/// A lane's way through its run, backward.
template <class T, class A, int N, bool kAll>
struct Walk {
  static constexpr int kAhead = kBackwardAhead;
  Lane<T, A, N, kAll> lane;
  const T* dy;                  // of the next token to be read
  T *dx, *dbefore;              // of the token K - 1 before the current one; of the last token before the row's first
  int own, steps, have;         // tokens of the run; and K - 1 behind it; and how many of these there are
  A x[K][N], share[K][N] = {};  // of the current token, the one before, …; what tokens have sent them so far
  Raw<T, N> next_x[kAhead] = {}, next_dy[kAhead] = {};
  Sums<A, N>& sums;

  __device__ Walk(const ShortConvParams<T, A>& p, const Place<N>& at, const T* dy_in, T* dx_in, T* dbefore_in,
                  Sums<A, N>& sums_in)
      : lane(p, at), own(at.count), steps(own + kPast), sums(sums_in) {
    const int64_t base = (at.batch * p.time + at.first) * p.channels + at.channel;
    dy = dy_in + base, dx = dx_in + base - kPast * static_cast<int64_t>(p.channels);
    dbefore = at.first == 0 ? before_row(dbefore_in, p, at.batch, -1, at.channel) : nullptr;
    have = static_cast<int>(min(static_cast<int64_t>(steps), p.time - at.first));
    lane.read_past(at, x);
  }

  __device__ void fetch(int ahead) {
    lane.fetch(next_x[ahead]);
    next_dy[ahead].load(dy);
    dy += lane.p.channels;
  }

  /// Token t sends its share to itself and those before, if there is such a token: what is behind the end has a
  /// gradient of 0, which times what the tokens before make of it may be NaN. Only the run's own tokens count for the
  /// sums.
  __device__ void send(A (&g)[N], int reach, bool exists, bool counts) {
    A z[N];
    lane.convolve(x, reach, z);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const A s = sigmoid<T>(z[i]), silu = z[i] * s;
      g[i] = exists ? g[i] * (s + silu * (1 - s)) : A(0);  // the gradient of z
      share[0][i] = lane.w[kPast][i] * g[i];
    }
#pragma unroll
    for (int back = 1; back < K; ++back) {
      if (!kAll && back > reach) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) share[back][i] += lane.w[kPast - back][i] * g[i];
    }
    if (counts) sums.add(g, x, kAll ? kPast : reach);
  }

  /// Tokens [begin, begin + kAhead). Inside: they are of the run, not its first ones, and as many follow.
  template <bool kInside>
  __device__ void group(int begin) {
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      const int t = begin + ahead;
      age(x), age(share);
      A g[N];
      unpack(next_x[ahead], x[0]), unpack(next_dy[ahead], g);
      next_x[ahead] = {}, next_dy[ahead] = {};
      if (kInside || t + kAhead < have) fetch(ahead);
      const bool exists = kInside || t < have;
      send(g, exists ? lane.reach(t) : 0, exists, kInside || t < own);
      // Nobody behind t sends anything to the token K - 1 before it.
      Raw<T, N> out;
      out.pack(share[kPast]);
      if (kInside || t >= kPast) {
        if (kInside || t < steps) out.store(dx);
      } else if (dbefore && t - kPast >= 1 - lane.p.taps) {
        out.store(dbefore + (t - kPast + 1) * static_cast<int64_t>(lane.p.channels));
      }
      dx += lane.p.channels;
    }
  }

  __device__ void run() {
    static_assert(kAhead >= kPast);
#pragma unroll
    for (int ahead = 0; ahead < kAhead; ++ahead) {
      if (ahead < have) fetch(ahead);
    }
    group<false>(0);
    int begin = kAhead;
    for (; begin + kAhead <= own && begin + 2 * kAhead <= have; begin += kAhead) group<true>(begin);
    for (; begin < steps; begin += kAhead) group<false>(begin);
  }
};

template <class T, class A, int N, bool kAll>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    backward(ShortConvParams<T, A> p, Runs runs, const T* dy, T* dx, T* dbefore, A* partials) {
  const Place<N> at(p, runs);
  Sums<A, N> sums = {};
  if (at.count > 0) Walk<T, A, N, kAll>(p, at, dy, dx, dbefore, sums).run();
  ptx::start_next_kernel();
  leave_sums(p, at, sums, partials);
}

/// So that the blocks that the device holds at once share the work evenly, as often as runs of kLongest take.
template <int N, class P>
Runs cut(const P& p, int64_t resident_blocks) {
  constexpr int64_t kLongest = 128, kShortest = 8;
  const int64_t blocks = channel_blocks<N>(p.channels),
                a_round = std::max<int64_t>(resident_blocks / blocks, 1) * kWarps;
  const int64_t rounds = (p.batch * p.time + a_round * kLongest - 1) / (a_round * kLongest);
  const int64_t all = std::max<int64_t>(rounds * resident_blocks / blocks, 1) * kWarps;
  const int64_t wanted = std::clamp<int64_t>(all / p.batch, 1, (p.time + kShortest - 1) / kShortest);
  const int64_t length = (p.time + wanted - 1) / wanted;
  return {static_cast<int>((p.time + length - 1) / length), static_cast<int>(length)};
}

int64_t rows_of_blocks(int64_t batch, Runs runs) { return (batch * runs.count + kWarps - 1) / kWarps; }

template <int N, class P>
unsigned blocks_of(const P& p, Runs runs) {
  return static_cast<unsigned>(rows_of_blocks(p.batch, runs) * channel_blocks<N>(p.channels));
}

/// f.operator()<channels a lane, every token has K>()
template <class T, class A, class F>
auto choose(const ShortConvParams<T, A>& p, const F& f) {
  constexpr int N = kChannels<T>;
  if (p.channels % N != 0 || p.x_batch % N != 0 || !is_aligned(p.x, N, p.x_time))
    return f.template operator()<1, false>();
  return p.reach || p.taps < K ? f.template operator()<N, false>() : f.template operator()<N, true>();
}

template <class T, class A, int N, bool kAll>
Runs backward_runs(const ShortConvParams<T, A>& p) {
  return cut<N>(p, resident_blocks(backward<T, A, N, kAll>, kThreads));
}

constexpr dim3 kBlock(32, kWarps);

}  // namespace

template <class T, class A>
cudaError_t short_conv(const ShortConvParams<T, A>& p, T* y, cudaStream_t stream) {
  if (p.batch * p.time * p.channels == 0) return cudaSuccess;
  choose(p, [&]<int N, bool kAll>() {
    const Runs runs = cut<N>(p, resident_blocks(forward<T, A, N, kAll>, kThreads));
    forward<T, A, N, kAll><<<blocks_of<N>(p, runs), kBlock, 0, stream>>>(p, runs, y);
  });
  return cudaGetLastError();
}

template <class T, class A>
int64_t short_conv_partials(const ShortConvParams<T, A>& p) {
  if (p.batch * p.time * p.channels == 0) return 0;
  return choose(p, [&]<int N, bool kAll>() { return rows_of_blocks(p.batch, backward_runs<T, A, N, kAll>(p)); });
}

template <class T, class A>
cudaError_t short_conv_backward(const ShortConvParams<T, A>& p, const T* dy, T* dx, T* dbefore, A* partials,
                                cudaStream_t stream) {
  if (p.batch * p.time * p.channels == 0) return cudaSuccess;
  choose(p, [&]<int N, bool kAll>() {
    const Runs runs = backward_runs<T, A, N, kAll>(p);
    backward<T, A, N, kAll><<<blocks_of<N>(p, runs), kBlock, 0, stream>>>(p, runs, dy, dx, dbefore, partials);
  });
  return cudaGetLastError();
}

#define FOX_INSTANTIATE(T)                                                                                         \
  template cudaError_t short_conv<T, Compute<T>>(const ShortConvParams<T, Compute<T>>&, T*, cudaStream_t);         \
  template int64_t short_conv_partials<T, Compute<T>>(const ShortConvParams<T, Compute<T>>&);                      \
  template cudaError_t short_conv_backward<T, Compute<T>>(const ShortConvParams<T, Compute<T>>&, const T*, T*, T*, \
                                                          Compute<T>*, cudaStream_t);

FOX_FOR_EACH_DTYPE(FOX_INSTANTIATE)

}  // namespace fox::cuda
