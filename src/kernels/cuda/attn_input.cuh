#pragma once

#include <numeric>

#include "kernels/cuda/attn_input.h"
#include "kernels/cuda/attn_input_walk.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/vec.cuh"

// Any dtype and head size; what training is made of has kernels of its own (attn_input_walk.cuh).
//
// A team of lanes has one head over a run of tokens. A lane holds the same elements of the head's two halves, which is
// what rotary turns together and two 16-byte loads a token; the mean of squares is a sum over the team's lanes.
//
// Forward loads a run of four tokens (and the one before it) before it computes. Backward walks a longer run from its
// end: token t's gradient needs that of t + 1, which the step before has just made, and x_{t-1}, which the next step
// needs as its own. So a run reads one token more on either side (from the cache: another team reads them too) and no
// token twice; loads are one token ahead of their use.
//
// These kernels are bound by the instructions an element costs as much as by memory, hence: threads that stand outside
// of the tensor load what its last head or token has and store nothing, instead of checking each load; boundaries of
// documents are predicates of single additions; what a kernel is never asked for is left out by its template.
namespace fox::cuda {
namespace {

constexpr int kBlock = 128;

// The place of a thread. threadIdx.x: heads side by side, each a team of `lanes`; threadIdx.y: runs side by side;
// blockIdx: runs, slices of heads, rows of the batch. A lane holds elements k = 0, …, N - 1 of pieces i = 0, …, P - 1
// in either half of its head; with P = 1 a lane has both or none. kLanes: how many make a team, 0 if only the launch
// knows: sums over lanes are shorter where the compiler does.
template <int N, int P, int kLanes>
struct Place {
  int team, lane, head, half, dim;
  bool has_head;

  template <class Params>
  __device__ Place(const Params& p, int lane_bits)
      : team(1 << lane_bits),
        lane(threadIdx.x & (lanes() - 1)),
        half(static_cast<int>(p.dim + 1) / 2),
        dim(static_cast<int>(p.dim)) {
    const int own = blockIdx.y * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
    const int last = static_cast<int>(p.heads) - 1;
    has_head = own <= last;
    head = min(own, last);
  }
  __device__ int lanes() const { return kLanes ? kLanes : team; }
  __device__ bool has(int part, int i) const {
    const int in_half = (i * lanes() + lane) * N;
    return in_half < half && (P == 1 || part * half + in_half < dim);
  }
  // A lane past the end stands on the head's first element.
  __device__ int offset(int part, int i) const { return has(part, i) ? part * half + (i * lanes() + lane) * N : 0; }
  // From the lane's first piece to another.
  __device__ int step(int part, int i) const { return offset(part, i) - offset(0, 0); }
};

// One token's elements of a lane as they lie in memory, and as they are computed with. Pointers are the lane's own.
template <class T, int N, int P>
struct Loaded {
  Raw<T, N> piece[2][P];

  template <class At>
  __device__ __forceinline__ void load(const At& at, const T* p) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < P; ++i) piece[part][i].load(p + at.step(part, i));
    }
  }
  __device__ __forceinline__ Compute<T> get(int part, int k) const { return piece[part][k / N][k % N]; }
};

template <class A, int N, int P>
struct Values {
  A v[2][N * P];

  // Calls f(part, k) for each element.
  template <class F>
  static __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int k = 0; k < N * P; ++k) f(part, k);
    }
  }
  // The sum of f(part, k) over the lane's elements, and over the head.
  template <class At, class F>
  static __device__ __forceinline__ A sum_own(const At& at, const F& f) {
    A total = 0;
    each([&](int part, int k) {
      if (P == 1 || at.has(part, k / N)) total += f(part, k);
    });
    return P > 1 || at.has(0, 0) ? total : A(0);
  }
  template <class At, class F>
  static __device__ __forceinline__ A sum(const At& at, const F& f) {
    return sum_lanes(sum_own(at, f), at.lanes());
  }
  template <class At, class T>
  __device__ __forceinline__ void store(const At& at, T* p) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        Raw<T, N> raw;
        raw.pack(v[part] + i * N);
        if (at.has(part, i)) raw.store(p + at.step(part, i));
      }
    }
  }
};

// The tokens of one head in one row of the batch. Strides of a token fit 32 bits, offsets do not.
template <class T, class A>
struct Row {
  const T *x, *prev, *shift;  // of token 0; of what stands before it, or of anything
  const bool* begins;
  int time, x_step, shift_step;
  bool has_prev, shift_is_logit;

  template <class Params>
  __device__ Row(const Params& p, int64_t b, int head, int lane_offset)
      : x(p.x + b * p.x_batch + head * p.x_head + lane_offset),
        prev(p.prev ? p.prev + (b * p.heads + head) * p.dim + lane_offset : x),
        shift(p.shift + b * p.shift_batch + head),
        begins(p.begins ? p.begins + b * p.time : nullptr),
        time(static_cast<int>(p.time)),
        x_step(static_cast<int>(p.x_time)),
        shift_step(static_cast<int>(p.shift_time)),
        has_prev(p.prev != nullptr),
        shift_is_logit(p.shift_is_logit) {}
  // Of the last token instead of one behind it; of prev for t < 0.
  __device__ const T* token(int t) const { return t < 0 ? prev : x + static_cast<int64_t>(min(t, time - 1)) * x_step; }
  // Whether token t has something before it; it may be prev.
  __device__ bool continues(int t) const { return t > 0 ? t < time && !(begins && begins[t]) : has_prev; }
  __device__ A alpha(int t) const {
    const A a = to_compute(shift[static_cast<int64_t>(min(t, time - 1)) * shift_step]);
    return shift_is_logit ? sigmoid<T>(a) : a;
  }
};

template <int N, int P, class Params, class At, class A>
__device__ __forceinline__ void load_weight(const Params& p, const At& at, Values<A, N, P>& w) {
  if (!p.weight) return w.each([&](int part, int k) { w.v[part][k] = 1; });
#pragma unroll
  for (int part = 0; part < 2; ++part) {
#pragma unroll
    for (int i = 0; i < P; ++i) {
      Vec<A, N> piece;
      piece.load(p.weight + at.head * p.weight_stride + at.offset(part, i));
#pragma unroll
      for (int k = 0; k < N; ++k) w.v[part][i * N + k] = piece.v[k];
    }
  }
}

// The pairs turned by the angles of token t, or back.
template <bool kBack, int N, int P, class Params, class At, class A>
__device__ __forceinline__ void rotate(const Params& p, const At& at, int t, Values<A, N, P>& x) {
  const int64_t row = static_cast<int64_t>(min(t, static_cast<int>(p.time) - 1)) * at.half;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    Vec<A, N> c, s;
    c.load(p.cos + row + at.offset(0, i));
    s.load(p.sin + row + at.offset(0, i));
#pragma unroll
    for (int k = 0; k < N; ++k) {
      A &low = x.v[0][i * N + k], &high = x.v[1][i * N + k];
      const A sine = kBack ? -s.v[k] : s.v[k], turned = low * c.v[k] - high * sine;
      high = low * sine + high * c.v[k];
      low = turned;
    }
  }
}

// α x_{t-1} + (1 - α) x_t. Nothing is multiplied by 0: what a boundary hides may be NaN.
template <class T, int N, int P, class A>
__device__ __forceinline__ void mix(const Loaded<T, N, P>& before, const Loaded<T, N, P>& now, A alpha, bool continues,
                                    Values<A, N, P>& y) {
  const A stay = 1 - alpha;
  y.each([&](int part, int k) { y.v[part][k] = stay * now.get(part, k); });
  if (continues) y.each([&](int part, int k) { y.v[part][k] += alpha * before.get(part, k); });
}

// kShift, kNorm: whether these steps may be asked for.
template <class T, class A, int N, int P, int kLanes, int L, bool kShift, bool kNorm>
__global__ void __launch_bounds__(kBlock, 5) forward(AttnInputParams<T, A> p, T* y, int lane_bits) {
  const Place<N, P, kLanes> at(p, lane_bits);
  const bool shift = kShift && p.shift, norm = kNorm && p.norm;
  const A inverse_dim = A(1) / at.dim;
  const int token_step = static_cast<int>(p.heads * p.dim);
  for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
    const Row<T, A> row(p, b, at.head, at.offset(0, 0));
    for (int first = blockIdx.x * blockDim.y * L; first < row.time; first += gridDim.x * blockDim.y * L) {
      const int t0 = first + threadIdx.y * L;
      Loaded<T, N, P> x[L + 1];  // of tokens t0 - 1 and on
      if (shift) x[0].load(at, row.token(t0 - 1));
#pragma unroll
      for (int u = 0; u < L; ++u) x[u + 1].load(at, row.token(t0 + u));
      T* target = y + ((b * p.time + t0) * p.heads + at.head) * p.dim + at.offset(0, 0);
#pragma unroll
      for (int u = 0; u < L; ++u) {
        const int t = t0 + u;
        Values<A, N, P> v;
        if (shift) {
          mix(x[u], x[u + 1], row.alpha(t), row.continues(t), v);
        } else {
          v.each([&](int part, int k) { v.v[part][k] = x[u + 1].get(part, k); });
        }
        if (norm) {
          const A squares = v.sum(at, [&](int part, int k) { return v.v[part][k] * v.v[part][k]; });
          const A r = rsqrt(squares * inverse_dim + p.eps);
          Values<A, N, P> w;
          load_weight(p, at, w);
          v.each([&](int part, int k) { v.v[part][k] *= r * w.v[part][k]; });
        }
        if (p.cos) p.inverse ? rotate<true>(p, at, t, v) : rotate<false>(p, at, t, v);
        if (at.has_head && t < row.time) v.store(at, target + u * token_step);
      }
    }
  }
}

// g, the gradient of the norm's result, becomes that of its argument x; dw gets the token's share if it is the team's
// own.
template <int N, int P, class Params, class At, class A>
__device__ __forceinline__ void through_norm(const Params& p, const At& at, const Values<A, N, P>& x, bool own,
                                             Values<A, N, P>& g, Values<A, N, P>& dw) {
  Values<A, N, P> w;
  load_weight(p, at, w);
  const A inverse_dim = A(1) / at.dim;
  const A squares = x.sum(at, [&](int part, int k) { return x.v[part][k] * x.v[part][k]; });
  const A dot = x.sum(at, [&](int part, int k) { return x.v[part][k] * (g.v[part][k] * w.v[part][k]); });
  const A r = rsqrt(squares * inverse_dim + p.eps), pull = dot * r * r * inverse_dim * r;
  g.each([&](int part, int k) { g.v[part][k] *= r; });
  if (own) dw.each([&](int part, int k) { dw.v[part][k] += g.v[part][k] * x.v[part][k]; });
  g.each([&](int part, int k) { g.v[part][k] = g.v[part][k] * w.v[part][k] - x.v[part][k] * pull; });
}

// The block's teams of one head add up what they have in an order of their own, then heads that share a weight meet.
template <int N, int P, class Params, class At, class A>
__device__ void leave_weight_gradient(const Params& p, const At& at, const Values<A, N, P>& dw, A* partial) {
  extern __shared__ __align__(16) unsigned char shared[];
  A* columns = reinterpret_cast<A*>(shared);
  const int block_heads = blockDim.x / at.lanes(), first_head = blockIdx.y * block_heads;
  A* own = columns + (threadIdx.x / at.lanes()) * at.dim;
  for (int turn = 0; turn < blockDim.y; ++turn) {
    if (at.has_head && threadIdx.y == turn) {
      dw.each([&](int part, int k) {
        if (!at.has(part, k / N)) return;
        A& column = own[at.offset(part, k / N) + k % N];
        column = (turn ? column : A(0)) + dw.v[part][k];
      });
    }
    __syncthreads();
  }
  const int heads = min(block_heads, static_cast<int>(p.heads) - first_head);
  const int64_t block = blockIdx.z * static_cast<int64_t>(gridDim.x) + blockIdx.x;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  if (p.weight_stride) {
    A* row = partial + (block * p.heads + first_head) * at.dim;
    for (int i = thread; i < heads * at.dim; i += threads) row[i] = columns[i];
    return;
  }
  for (int i = thread; i < at.dim; i += threads) {
    A total = 0;
    for (int head = 0; head < heads; ++head) total += columns[head * at.dim + i];
    partial[(block * gridDim.y + blockIdx.y) * at.dim + i] = total;
  }
}

// What one token's gradient needs beside x: its dy and how it is shifted.
template <class T, class A, int N, int P>
struct Step {
  Loaded<T, N, P> dy;
  A alpha = 0;
  bool continues = false;
};

template <class T, class A, int N, int P, int kLanes, bool kShift, bool kNorm>
__global__ void __launch_bounds__(kBlock, kShift&& kNorm ? 3
                                          : kShift       ? 3
                                                         : 4)
    backward(AttnInputParams<T, A> p, const T* dy, AttnInputGradients<T, A> out, int lane_bits, int run) {
  const Place<N, P, kLanes> at(p, lane_bits);
  const bool shift = kShift && p.shift, norm = kNorm && p.norm;
  const int token_step = static_cast<int>(p.heads * p.dim);
  Values<A, N, P> dw = {};
  for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
    const Row<T, A> row(p, b, at.head, at.offset(0, 0));
    const int64_t origin = b * p.time * p.heads + at.head;  // of the head in (B, T, H)
    const T* dy_row = dy + origin * p.dim + at.offset(0, 0);
    T* dx_row = out.dx + origin * p.dim + at.offset(0, 0);
    for (int first = blockIdx.x * blockDim.y * run; first < row.time; first += gridDim.x * blockDim.y * run) {
      const int t0 = first + threadIdx.y * run, end = min(t0 + run, row.time);
      const auto load = [&](int t, Step<T, A, N, P>& step) {
        step.dy.load(at, dy_row + static_cast<int64_t>(min(t, row.time - 1)) * token_step);
        if (shift) step.alpha = row.alpha(t), step.continues = row.continues(t);
      };
      Loaded<T, N, P> now, before, ahead;  // tokens t, t - 1, t - 2
      Values<A, N, P> next = {};           // α of the token behind times its gradient
      bool passed_on = false;
      const auto advance = [&](int t, const Step<T, A, N, P>& step, Step<T, A, N, P>& step_ahead) {
        ahead.load(at, row.token(t - 2));
        load(max(t - 1, 0), step_ahead);
        const bool own = at.has_head && t < end;
        Values<A, N, P> g, x;
        g.each([&](int part, int k) { g.v[part][k] = step.dy.get(part, k); });
        if (p.cos) rotate<true>(p, at, t, g);
        if (norm) {
          if (shift) {
            mix(before, now, step.alpha, step.continues, x);
          } else {
            x.each([&](int part, int k) { x.v[part][k] = now.get(part, k); });
          }
          through_norm(p, at, x, own, g, dw);
        }
        if (!shift) {
          if (own) g.store(at, dx_row + static_cast<int64_t>(t) * token_step);
        } else {
          const A stay = 1 - step.alpha;
          A dalpha = -x.sum_own(at, [&](int part, int k) { return g.v[part][k] * now.get(part, k); });
          if (step.continues) {
            dalpha += x.sum_own(at, [&](int part, int k) { return g.v[part][k] * before.get(part, k); });
          }
          dalpha = sum_lanes(dalpha, at.lanes());
          x.each([&](int part, int k) { x.v[part][k] = stay * g.v[part][k]; });
          if (passed_on) x.each([&](int part, int k) { x.v[part][k] += next.v[part][k]; });
          next.each([&](int part, int k) { next.v[part][k] = step.alpha * g.v[part][k]; });
          if (own) {
            x.store(at, dx_row + static_cast<int64_t>(t) * token_step);
            if (at.lane == 0) {
              out.dshift[origin + t * p.heads] =
                  from_compute<T>(p.shift_is_logit ? dalpha * step.alpha * stay : dalpha);
            }
            if (out.dprev && t == 0) {
              next.store(at, out.dprev + (b * p.heads + at.head) * p.dim + at.offset(0, 0));
            }
          }
          passed_on = t > 0 && step.continues;
        }
        now = before, before = ahead;
      };
      // With a shift, the token behind the run passes its gradient on to the run's last.
      int t = t0 + (shift ? run : run - 1);
      Step<T, A, N, P> even, odd;
      now.load(at, row.token(t));
      before.load(at, row.token(t - 1));
      load(t, even);
      while (true) {  // two steps a round, so that what was loaded ahead need not be moved
        advance(t, even, odd);
        if (--t < t0) break;
        advance(t, odd, even);
        if (--t < t0) break;
      }
    }
  }
  if (kNorm && out.partial) leave_weight_gradient(p, at, dw, out.partial);
}

// --- launching -------------------------------------------------------------------------------------------------------

constexpr int64_t kMaxGridZ = 65535;
constexpr int kNarrowPieces = kAttnInputMaxDim / 64;

/// A block is `threads.x / lanes` heads side by side and `threads.y` runs; `slices` of them make all heads.
struct Shape {
  int lane_bits = 0;
  dim3 threads;
  unsigned slices, batch;

  template <class T, class A>
  Shape(const AttnInputParams<T, A>& p, int64_t half_pieces) {
    while ((1 << lane_bits) < 32 && (1 << lane_bits) < half_pieces) ++lane_bits;
    const int lanes = 1 << lane_bits;
    const int heads = static_cast<int>(std::min<int64_t>(p.heads, kBlock / lanes));
    int across = heads * lanes;
    // Whole warps: shuffles meet all of their lanes.
    if (across * 32 / std::gcd(across, 32) > kBlock) across = (across + 31) / 32 * 32;
    const int step = 32 / std::gcd(across, 32);
    threads = dim3(across, std::max(kBlock / across / step, 1) * step);
    slices = static_cast<unsigned>((p.heads + across / lanes - 1) / (across / lanes));
    batch = static_cast<unsigned>(std::min(p.batch, kMaxGridZ));
  }
  /// Blocks along the time: enough for all runs of this length, and no more than run at once.
  unsigned along(int64_t time, int64_t run, int64_t resident) const {
    const int64_t all = (time + run * threads.y - 1) / (run * threads.y);
    return static_cast<unsigned>(std::max<int64_t>(std::min(all, resident / (slices * batch)), 1));
  }
};

/// Heads of whole 16-byte pieces, or any.
template <class T, class A>
bool is_wide(const AttnInputParams<T, A>& p) {
  constexpr int N = kVec<T>;
  return p.dim % (2 * N) == 0 && p.dim / (2 * N) <= 32 && is_vectorizable<T>(p.x, p.x_batch, p.x_time, p.x_head) &&
         is_vectorizable<T>(p.prev) && is_vectorizable<A>(p.cos) && is_vectorizable<A>(p.sin) &&
         is_vectorizable<A>(p.weight);
}
template <class T, class A>
Shape shape_of(const AttnInputParams<T, A>& p) {
  return {p, is_wide(p) ? p.dim / (2 * kVec<T>) : 32};
}

/// Calls f.template operator()<N, P, kLanes>() for the head's size.
template <class T, class A, class F>
auto with_layout(const AttnInputParams<T, A>& p, const F& f) {
  constexpr int N = kVec<T>;
  if (!is_wide(p)) return f.template operator()<1, kNarrowPieces, 32>();
  if constexpr (std::is_same_v<T, __half>) {
    if (p.dim == 64) return f.template operator()<N, 1, 64 / (2 * N)>();
    if (p.dim == 128) return f.template operator()<N, 1, 128 / (2 * N)>();
  }
  return f.template operator()<N, 1, 0>();
}
constexpr int kRun = 2;
template <class T, class A>
auto forward_kernel(const AttnInputParams<T, A>& p) {
  return with_layout(p, [&]<int N, int P, int kLanes>() {
    if (P > 1 || (p.shift && p.norm)) return forward<T, A, N, P, kLanes, kRun, true, true>;
    if (p.shift) return forward<T, A, N, P, kLanes, kRun, true, P != 1>;
    return p.norm ? forward<T, A, N, P, kLanes, kRun, P != 1, true> : forward<T, A, N, P, kLanes, kRun, P != 1, P != 1>;
  });
}
template <class T, class A>
auto backward_kernel(const AttnInputParams<T, A>& p) {
  return with_layout(p, [&]<int N, int P, int kLanes>() {
    if (P > 1 || (p.shift && p.norm)) return backward<T, A, N, P, kLanes, true, true>;
    return p.shift ? backward<T, A, N, P, kLanes, true, P != 1> : backward<T, A, N, P, kLanes, P != 1, true>;
  });
}

/// How backward is launched: every thread that the device holds at once has as many tokens, in runs of a length within
/// bounds.
struct BackwardLaunch {
  dim3 grid;
  int run;
  size_t shared;

  template <class T, class A>
  BackwardLaunch(const AttnInputParams<T, A>& p, const Shape& shape) {
    constexpr int64_t kShortest = 4, kLongest = 32;
    shared = p.norm ? (shape.threads.x >> shape.lane_bits) * p.dim * sizeof(A) : 0;
    const int64_t resident = resident_blocks(backward_kernel(p), shape.threads.x * shape.threads.y, shared);
    const int64_t places = std::max<int64_t>(resident * shape.threads.y / (shape.slices * shape.batch), 1);
    const int64_t tokens = (p.time + places - 1) / places, rounds = (tokens + kLongest - 1) / kLongest;
    run = static_cast<int>(std::max(kShortest, (tokens + rounds - 1) / rounds));
    grid = dim3(shape.along(p.time, run, resident), shape.slices, shape.batch);
  }
};

/// Whether the kernels of attn_input_walk.cuh take p.
template <class T, class A>
bool can_walk(const AttnInputParams<T, A>& p) {
  if (!std::is_same_v<T, __nv_bfloat16> || !is_wide(p) || (p.dim != 64 && p.dim != 128)) return false;
  return p.norm ? p.weight != nullptr : (p.shift != nullptr) != (p.cos != nullptr);
}

/// Calls f.template operator()<kLanes, kShift, kNorm, kRotate>() for the kernel that p takes. Backward is never asked
/// for a rotation alone, which is a rotation forward.
template <bool kForward, class F>
auto with_walk(const walk::Params& p, const F& f) {
  const auto with_lanes = [&]<int kLanes>() {
    if (p.shift && p.norm && p.cos) return f.template operator()<kLanes, true, true, true>();
    if (p.shift && p.norm) return f.template operator()<kLanes, true, true, false>();
    if (p.shift) return f.template operator()<kLanes, true, false, false>();
    if constexpr (kForward) {
      if (!p.norm) return f.template operator()<kLanes, false, false, true>();
    }
    if (p.cos) return f.template operator()<kLanes, false, true, true>();
    return f.template operator()<kLanes, false, true, false>();
  };
  return p.dim == 64 ? with_lanes.template operator()<4>() : with_lanes.template operator()<8>();
}

/// How a walk is launched: every thread that the device holds at once has as many tokens, in runs of a length within
/// bounds.
struct WalkLaunch {
  dim3 grid, threads;
  int run, shared;

  template <class Kernel>
  WalkLaunch(Kernel kernel, size_t shared_bytes, const walk::Params& p) : shared(static_cast<int>(shared_bytes)) {
    constexpr int64_t kShortest = 4, kLongest = 128;
    const Shape shape = shape_of(p);
    threads = shape.threads;
    const int64_t resident = resident_blocks(kernel, threads.x * threads.y, shared_bytes);
    const int64_t places = std::max<int64_t>(resident * threads.y / (shape.slices * shape.batch), 1);
    const int64_t tokens = (p.time + places - 1) / places, rounds = (tokens + kLongest - 1) / kLongest;
    run = static_cast<int>(std::max(kShortest, (tokens + rounds - 1) / rounds));
    grid = dim3(shape.along(p.time, run, resident), shape.slices, shape.batch);
  }
};

// A template, so that the other dtypes' files do not compile these kernels too.
template <class T>
cudaError_t walk_forward(const AttnInputParams<T, float>& p, T* y, cudaStream_t stream) {
  return with_walk<true>(p, [&]<int kLanes, bool kShift, bool kNorm, bool kRotate>() {
    const auto kernel = walk::forward<kLanes, kShift, kNorm, kRotate>;
    const WalkLaunch launch(kernel, walk::Ring<1>::kBytes, p);
    return launch_early(kernel, launch.grid, launch.threads, launch.shared, stream, p, y, launch.run);
  });
}

/// Calls f(kernel, how to launch it).
template <class T, class F>
auto with_walk_backward(const AttnInputParams<T, float>& p, const F& f) {
  return with_walk<false>(p, [&]<int kLanes, bool kShift, bool kNorm, bool kRotate>() {
    const auto kernel = walk::backward<kLanes, kShift, kNorm, kRotate>;
    // The weight's gradient goes by each head or each warp through what the tokens came through.
    const dim3 threads = shape_of(p).threads;
    const unsigned heads = threads.x / kLanes, warps = threads.x * threads.y / 32;
    const size_t columns = kNorm ? std::max(heads, warps) * p.dim * sizeof(float) : 0;
    return f(kernel, WalkLaunch(kernel, std::max<size_t>(columns, walk::Ring<2>::kBytes), p));
  });
}
template <class T>
cudaError_t walk_backward(const AttnInputParams<T, float>& p, const T* dy,
                          const AttnInputGradients<T, float>& gradients, cudaStream_t stream) {
  return with_walk_backward(p, [&](auto kernel, const WalkLaunch& launch) {
    return launch_early(kernel, launch.grid, launch.threads, launch.shared, stream, p, dy, gradients, launch.run);
  });
}

}  // namespace

template <class T, class A>
cudaError_t attn_input(const AttnInputParams<T, A>& p, T* y, cudaStream_t stream) {
  if (p.batch * p.time * p.heads * p.dim == 0) return cudaSuccess;
  if constexpr (std::is_same_v<T, walk::T>) {
    if (can_walk(p)) return walk_forward(p, y, stream);
  }
  const Shape shape = shape_of(p);
  const auto kernel = forward_kernel(p);
  const int64_t resident = 4 * resident_blocks(kernel, shape.threads.x * shape.threads.y);
  const dim3 grid(shape.along(p.time, kRun, resident), shape.slices, shape.batch);
  kernel<<<grid, shape.threads, 0, stream>>>(p, y, shape.lane_bits);
  return cudaGetLastError();
}

template <class T, class A>
int64_t attn_input_backward_partials(const AttnInputParams<T, A>& p) {
  dim3 grid = BackwardLaunch(p, shape_of(p)).grid;
  if constexpr (std::is_same_v<T, walk::T>) {
    if (can_walk(p) && p.norm) grid = with_walk_backward(p, [](auto, const WalkLaunch& launch) { return launch.grid; });
  }
  return static_cast<int64_t>(grid.x) * grid.z * (p.weight_stride ? 1 : grid.y);
}

template <class T, class A>
cudaError_t attn_input_backward(const AttnInputParams<T, A>& p, const T* dy, const AttnInputGradients<T, A>& gradients,
                                cudaStream_t stream) {
  if (p.batch * p.time * p.heads * p.dim == 0) return cudaSuccess;
  if constexpr (std::is_same_v<T, walk::T>) {
    if (can_walk(p) && (p.shift || p.norm)) return walk_backward(p, dy, gradients, stream);
  }
  const Shape shape = shape_of(p);
  const BackwardLaunch launch(p, shape);
  backward_kernel(p)<<<launch.grid, shape.threads, launch.shared, stream>>>(p, dy, gradients, shape.lane_bits,
                                                                            launch.run);
  return cudaGetLastError();
}

}  // namespace fox::cuda

/// One file a dtype: each takes a minute to compile.
#define FOX_INSTANTIATE_ATTN_INPUT(T)                                                                      \
  template cudaError_t attn_input<T, Compute<T>>(const AttnInputParams<T, Compute<T>>&, T*, cudaStream_t); \
  template int64_t attn_input_backward_partials<T, Compute<T>>(const AttnInputParams<T, Compute<T>>&);     \
  template cudaError_t attn_input_backward<T, Compute<T>>(const AttnInputParams<T, Compute<T>>&, const T*, \
                                                          const AttnInputGradients<T, Compute<T>>&, cudaStream_t);
