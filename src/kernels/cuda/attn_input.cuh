#pragma once

#include <numeric>

#include "kernels/cuda/attn_input.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/vec.cuh"

// A team of lanes has one head over a run of tokens. A lane holds the same elements of the head's two halves, which is
// what rotary turns together and two 16-byte pieces a token; the mean of squares is a sum over the team's lanes.
//
// The device holds all runs at once, so that they are long. Forward walks its run from the first token, backward from
// the last: token t's gradient needs that of t + 1, which the step before has just made, and x_{t-1}, which the next
// step needs as its own. So a run reads one token more on either side, and computes one more backward, and reads no
// token twice. Tokens come through shared memory, two steps ahead of their use.
//
// Instructions and registers are as scarce here as bandwidth, hence: what one step leaves to the next changes its name
// every second step instead of its place; threads that stand outside of the tensor read what its last head or token has
// and store nothing, instead of checking each load; what a boundary of documents hides is masked where 16-bit elements
// become float32, which costs nothing; scalars are loaded steps before they are computed with; what a kernel is never
// asked for is left out by its template.
namespace fox::cuda {
namespace {

constexpr int kBlock = 128;

// The place of a thread. threadIdx.x: heads side by side, each a team of `lanes`; threadIdx.y: runs side by side;
// blockIdx: runs, slices of heads, rows of the batch. A lane holds elements k = 0, …, N - 1 of pieces i = 0, …, P - 1
// in either half of its head; with P = 1 a lane has both or none. kLanes: how many make a team, 0 if only the launch
// knows: sums over lanes are shorter where the compiler does.
template <int N, int P, int kLanes>
struct Place {
  static constexpr bool kExact = P == 1 && kLanes > 0;  // every lane has all its elements
  int team, lane, head, dim, dynamic_half;
  bool has_head;

  template <class Params>
  __device__ Place(const Params& p, int lane_bits)
      : team(1 << lane_bits),
        lane(threadIdx.x & (lanes() - 1)),
        dim(kExact ? 2 * N * kLanes : static_cast<int>(p.dim)),
        dynamic_half(static_cast<int>(p.dim + 1) / 2) {
    const int own = blockIdx.y * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
    const int last = static_cast<int>(p.heads) - 1;
    has_head = own <= last;
    head = min(own, last);
  }
  __device__ int lanes() const { return kLanes ? kLanes : team; }
  __device__ int half() const { return kExact ? N * kLanes : dynamic_half; }
  __device__ bool has(int part, int i) const {
    if (kExact) return true;
    const int in_half = (i * lanes() + lane) * N;
    return in_half < half() && (P == 1 || part * half() + in_half < dim);
  }
  // A lane past the end stands on the head's first element.
  __device__ int offset(int part, int i) const { return has(part, i) ? part * half() + (i * lanes() + lane) * N : 0; }
  // From the lane's first piece to another.
  __device__ int step(int part, int i) const { return kExact ? part * half() : offset(part, i) - offset(0, 0); }
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
  // The element, or 0 without `shown`. Of bfloat16 at no cost: a product or a mask makes it float32 anyway.
  __device__ __forceinline__ Compute<T> get_if(bool shown, int part, int k) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && N > 1) {
      const uint32_t pair = reinterpret_cast<const uint32_t*>(&piece[part][k / N].word)[k % N / 2];
      return __uint_as_float(k % 2 ? pair & (shown ? 0xffff0000U : 0) : pair * (shown ? 0x10000U : 0));
    } else {
      return shown ? get(part, k) : Compute<T>(0);
    }
  }
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
    return P > 1 || At::kExact || at.has(0, 0) ? total : A(0);
  }
  template <class At, class F>
  static __device__ __forceinline__ A sum(const At& at, const F& f) {
    return sum_lanes(sum_own(at, f), at.lanes());
  }
  template <class At>
  __device__ __forceinline__ void load(const At& at, const A* p) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        Vec<A, N> piece;
        piece.load(p + at.step(part, i));
#pragma unroll
        for (int k = 0; k < N; ++k) v[part][i * N + k] = piece.v[k];
      }
    }
  }
  // Adds the lane's own elements of what stands there.
  template <class At>
  __device__ __forceinline__ void add(const At& at, const A* p) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (!at.has(part, i)) continue;
        Vec<A, N> piece;
        piece.load(p + at.step(part, i));
#pragma unroll
        for (int k = 0; k < N; ++k) v[part][i * N + k] += piece.v[k];
      }
    }
  }
  template <class At, class T>
  __device__ __forceinline__ void store(const At& at, T* p) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        Vec<T, N> piece;
#pragma unroll
        for (int k = 0; k < N; ++k) piece.v[k] = v[part][i * N + k];
        if (at.has(part, i)) piece.store(p + at.step(part, i));
      }
    }
  }
};

// The token t of a tensor whose tokens lie `bytes` apart.
template <class T>
__device__ __forceinline__ T* token(T* base, int t, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  int64_t offset;  // one instruction, which the compiler would otherwise make a product of 64 bits
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(offset) : "r"(t), "r"(bytes));
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + offset);
}

// The tokens of one head in one row of the batch. Strides of a token fit 32 bits in bytes, offsets do not.
template <class T, class A>
struct Row {
  const AttnInputParams<T, A>& p;
  const T *x, *shift;  // of token 0
  int64_t b;
  int head, lane_offset, last, x_bytes, shift_bytes;

  __device__ Row(const AttnInputParams<T, A>& p, int64_t b, int head, int lane_offset)
      : p(p),
        x(p.x + b * p.x_batch + head * p.x_head + lane_offset),
        shift(p.shift + b * p.shift_batch + head),
        b(b),
        head(head),
        lane_offset(lane_offset),
        last(static_cast<int>(p.time) - 1),
        x_bytes(static_cast<int>(p.x_time * sizeof(T))),
        shift_bytes(static_cast<int>(p.shift_time * sizeof(T))) {}
  // Where the lane's elements lie in a contiguous (B, H, D).
  __device__ int64_t in_heads() const { return (b * p.heads + head) * p.dim + lane_offset; }
  __device__ const T* before_first() const { return p.prev + in_heads(); }
  // Of the first or last token instead of one outside.
  __device__ const T* x_at(int t) const { return token(x, max(min(t, last), 0), x_bytes); }
};

// How the tokens of a run are shifted. Each lane of a team knows it of one step in as many as the team has lanes, and
// loads it as many steps ahead: a load a step would hold up the others that wait with it.
template <class T, class A>
struct Shifts {
  T loaded;
  bool begins = false;
  A alpha;             // of the lane's step
  unsigned continues;  // bits of the steps from this one on: whether the step's token has something before it

  // t: the token of the lane's step.
  __device__ __forceinline__ void load(const Row<T, A>& row, int t) {
    t = max(min(t, row.last), 0);
    loaded = *token(row.shift, t, row.shift_bytes);
    if (row.p.begins) begins = row.p.begins[row.b * row.p.time + t];
  }
  __device__ __forceinline__ void take(const Row<T, A>& row, int t, int lanes) {
    alpha = to_compute(loaded);
    if (row.p.shift_is_logit) alpha = sigmoid<T>(alpha);
    const int in_warp = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
    const bool something = t > 0 ? t <= row.last && !begins : row.p.prev != nullptr;
    continues = __ballot_sync(0xffffffffU, something) >> (in_warp & -lanes);
  }
  // α of the next step, and whether its token has something before it.
  __device__ __forceinline__ A next(int lane, int lanes, bool& has_before) {
    has_before = continues & 1;
    continues >>= 1;
    return __shfl_sync(0xffffffffU, alpha, lane, lanes);
  }
};

// α x_{t-1} + (1 - α) x_t = x_t + α d with d = x_{t-1} - x_t, or -x_t with nothing before it. Nothing is multiplied by
// 0: what a boundary hides may be NaN.
template <class T, int N, int P, class A>
__device__ __forceinline__ void mix(const Loaded<T, N, P>& before, bool has_before, const Loaded<T, N, P>& now, A alpha,
                                    Values<A, N, P>& d, Values<A, N, P>& mixed) {
  d.each([&](int part, int k) {
    d.v[part][k] = before.get_if(has_before, part, k) - now.get(part, k);
    mixed.v[part][k] = now.get(part, k) + alpha * d.v[part][k];
  });
}

__device__ __forceinline__ void copy_piece(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Through L1, for what several warps read.
__device__ __forceinline__ void copy_common_piece(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void load_piece(uint32_t from, uint4& w) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
               : "r"(from)
               : "memory");
}

// What steps read is on its way through shared memory two steps before: registers hold what is computed with alone. Of
// tokens a thread reads what it has copied itself, so there is no barrier; angles, which threads of a warp share, take
// a __syncwarp. A slot is a step; steps go in pairs, and the slots of the next pair are those of the one before.
constexpr int kAhead = 2, kSlots = 4;
__device__ __forceinline__ void commit_step() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_step() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
}

// Where the slots are, `bytes` each.
struct Slots {
  uint32_t now, both;  // of this pair; of this and the next one added up

  __device__ Slots(uint32_t first, uint32_t bytes) : now(first), both(2 * first + 2 * bytes) {}
  // Of a step from this pair's first on, up to the next pair's second.
  __device__ __forceinline__ uint32_t at(int step, uint32_t bytes) const {
    return (step < 2 ? now : both - now) + step % 2 * bytes;
  }
  __device__ __forceinline__ void next_pair() { now = both - now; }
};

// A lane's two pieces of each of kTensors tensors.
template <class T, int kTensors>
struct Ring {
  static constexpr int kPiece = 16 * kBlock, kSlot = 2 * kTensors * kPiece, kBytes = kSlots * kSlot;
  Slots slots;

  __device__ explicit Ring(const void* shared)
      : slots(ptx::smem_u32(shared) + (threadIdx.y * blockDim.x + threadIdx.x) * 16, kSlot) {}
  // p is the first piece, the second `half` elements on.
  __device__ __forceinline__ void copy(int step, int tensor, const T* p, int half) const {
    const uint32_t to = slots.at(step, kSlot) + 2 * tensor * kPiece;
    copy_piece(to, p);
    copy_piece(to + kPiece, p + half);
  }
  template <int N>
  __device__ __forceinline__ void get(int step, int tensor, Loaded<T, N, 1>& to) const {
    const uint32_t from = slots.at(step, kSlot) + 2 * tensor * kPiece;
#pragma unroll
    for (int part = 0; part < 2; ++part) load_piece(from + part * kPiece, to.piece[part][0].word);
  }
};

// 16-byte pieces of n numbers, which with P = 1 are whole ones.
template <class A, int n>
constexpr int kPiecesOf = std::max(static_cast<int>(sizeof(A)) * n / 16, 1);

// The angles of a token's pairs, in shared memory too: the threads of a warp that stand at the same token, whole teams,
// share out their pieces. Where they are no 16-byte pieces: from global memory.
template <class A, int N, int P>
struct Angles {
  static constexpr int kPieces = kPiecesOf<A, N>;  // a lane's cosines, and its sines
  const A *cos, *sin;                              // of token 0, of the lane with P > 1
  int bytes, last;
  int sharers, own;   // the threads, and which of them this one is
  int pieces, lanes;  // of the head's cosines, and the team's
  uint32_t slot_bytes, lane_offset;
  Slots slots;
  A c[N * P], s[N * P];

  // At how many tokens a warp may stand at most.
  static __host__ __device__ int warp_runs(int across, int lanes) {
    return across % 32 == 0 ? 1 : across < 32 ? 32 / lanes : 2;
  }
  static __host__ __device__ int slot_size(int across, int threads, int lanes) {
    return threads / 32 * warp_runs(across, lanes) * 2 * kPieces * lanes * 16;
  }

  template <class Params, class At>
  __device__ Angles(const Params& p, const At& at, const void* shared)
      : cos(p.cos + (P == 1 ? 0 : at.offset(0, 0))),
        sin(p.sin + (P == 1 ? 0 : at.offset(0, 0))),
        bytes(at.half() * static_cast<int>(sizeof(A))),
        last(static_cast<int>(p.time) - 1),
        pieces(bytes / 16),
        lanes(at.lanes()),
        slot_bytes(slot_size(blockDim.x, blockDim.x * blockDim.y, lanes)),
        lane_offset(at.lane * 16),
        slots(0, 0) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / 32;
    const int first = max(static_cast<int>(threadIdx.y * blockDim.x), warp * 32);
    sharers = min(static_cast<int>((threadIdx.y + 1) * blockDim.x), warp * 32 + 32) - first, own = thread - first;
    const int run = warp * warp_runs(blockDim.x, lanes) + static_cast<int>(threadIdx.y - warp * 32 / blockDim.x);
    slots = Slots(ptx::smem_u32(shared) + run * 2 * kPieces * lanes * 16, slot_bytes);
  }
  // A lane's cosines are pieces i = lane kPieces, …; the lanes' first ones stand side by side, then their second ones.
  __device__ __forceinline__ void copy(int step, int t) const {
    const uint32_t to = slots.at(step, slot_bytes), sines = kPieces * lanes * 16;
    t = min(t, last);
    for (int i = own; i < pieces; i += sharers) {
      const uint32_t at = to + (i % kPieces * lanes + i / kPieces) * 16;
      copy_common_piece(at, reinterpret_cast<const uint4*>(token(cos, t, bytes)) + i);
      copy_common_piece(at + sines, reinterpret_cast<const uint4*>(token(sin, t, bytes)) + i);
    }
  }
  __device__ __forceinline__ void get(int step) {
    const uint32_t from = slots.at(step, slot_bytes) + lane_offset, sines = kPieces * lanes * 16;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      load_piece(from + i * lanes * 16, reinterpret_cast<uint4*>(c)[i]);
      load_piece(from + i * lanes * 16 + sines, reinterpret_cast<uint4*>(s)[i]);
    }
  }
  template <class At>
  __device__ __forceinline__ void load(const At& at, int t) {
    t = min(t, last);
#pragma unroll
    for (int i = 0; i < P; ++i) {
      c[i] = *(token(cos, t, bytes) + at.step(0, i));
      s[i] = *(token(sin, t, bytes) + at.step(0, i));
    }
  }
  // The pairs turned by the angles times `way`, 1 or -1.
  __device__ __forceinline__ void turn(A way, Values<A, N, P>& x) const {
#pragma unroll
    for (int k = 0; k < N * P; ++k) {
      A &low = x.v[0][k], &high = x.v[1][k];
      const A sine = way * s[k], turned = low * c[k] - high * sine;
      high = low * sine + high * c[k];
      low = turned;
    }
  }
};

// The lane's elements of the weight in shared memory, a thread's own, or in global memory where they are no 16-byte
// pieces.
template <class A, int N, int P>
struct Weight {
  static constexpr int kPieces = kPiecesOf<A, 2 * N>, kBytes = kPieces * kBlock * 16;
  const A* source;
  uint4* own;

  template <class At>
  __device__ Weight(const At& at, const A* weight, void* shared)
      : source(weight), own(static_cast<uint4*>(shared) + threadIdx.y * blockDim.x + threadIdx.x) {
    if (P > 1 || !weight) return;
    Values<A, N, P> w;
    w.load(at, source);
    for (int i = 0; i < kPieces; ++i) own[i * kBlock] = reinterpret_cast<const uint4*>(&w)[i];
  }
  template <class At>
  __device__ __forceinline__ void get(const At& at, Values<A, N, P>& w) const {
    if constexpr (P > 1) {
      w.load(at, source);
    } else {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) reinterpret_cast<uint4*>(&w)[i] = own[i * kBlock];
    }
  }
};

// kShift, kNorm, kRotate: whether these steps may be asked for.
template <class T, class A, int N, int P, int kLanes, bool kShift, bool kNorm, bool kRotate>
__global__ void __launch_bounds__(kBlock, P > 1 ? 1 : 4)
    forward(AttnInputParams<T, A> p, T* y, int lane_bits, int run) {
  extern __shared__ __align__(16) unsigned char shared[];
  using V = Values<A, N, P>;
  const Place<N, P, kLanes> at(p, lane_bits);
  const bool shift = kShift && (P == 1 || p.shift), norm = kNorm && (P == 1 || p.weight);
  const A inverse_dim = A(1) / at.dim, way = p.inverse ? -1 : 1;
  const int y_bytes = static_cast<int>(p.heads * p.dim * sizeof(T));
  Ring<T, 1> ring(shared);
  Angles<A, N, P> angles(p, at, shared + ring.kBytes);
  ptx::wait_for_previous_kernel();
  V w;
  if (norm) w.load(at, p.weight + at.head * p.weight_stride + at.offset(0, 0));
  for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
    const Row<T, A> row(p, b, at.head, at.offset(0, 0));
    T* y_row = y + (b * p.time * p.heads + at.head) * p.dim + at.offset(0, 0);
    for (int first = blockIdx.x * blockDim.y * run; first <= row.last; first += gridDim.x * blockDim.y * run) {
      const int t0 = first + threadIdx.y * run;
      const int end = at.has_head ? min(t0 + run, row.last + 1) : 0;  // of the tokens that are the team's own
      const auto fetch = [&](int step, int i) {
        if (i < run) {
          ring.copy(step, 0, row.x_at(t0 + i), at.step(1, 0));
          if (kRotate) angles.copy(step, t0 + i);
        }
        commit_step();
      };
      Shifts<T, A> shifts;
      const auto advance = [&](int step, int i, const Loaded<T, N, P>& before, Loaded<T, N, P>& now) {
        const int t = t0 + i;
        A alpha = 0;
        bool has_before = false;
        if (shift) {
          const int turn = i & (at.lanes() - 1);
          if (turn == 0) {
            shifts.take(row, t + at.lane, at.lanes());
            shifts.load(row, t + at.lanes() + at.lane);
          }
          alpha = shifts.next(turn, at.lanes(), has_before);
        }
        if constexpr (P == 1) {
          wait_for_step();
          if (kRotate) __syncwarp();  // the angles come by other threads' copies
          ring.get(step, 0, now);
          if (kRotate) angles.get(step);
          fetch(step + kAhead, i + kAhead);
        } else {
          now.load(at, row.x_at(t));
          if (kRotate) angles.load(at, t);
        }
        V v, d;
        if (shift) {
          mix(before, has_before, now, alpha, d, v);
        } else {
          v.each([&](int part, int k) { v.v[part][k] = now.get(part, k); });
        }
        if (norm) {
          const A squares = v.sum(at, [&](int part, int k) { return v.v[part][k] * v.v[part][k]; });
          const A r = rsqrt(squares * inverse_dim + p.eps);
          v.each([&](int part, int k) { v.v[part][k] *= r * w.v[part][k]; });
        }
        if (kRotate) angles.turn(way, v);
        if (t < end) v.store(at, token(y_row, t, y_bytes));
      };
      if constexpr (P == 1) {
        if (kRotate) __syncwarp();  // others may still read the angles of the run before, whose slots these are
        for (int i = 0; i < kAhead; ++i) fetch(i, i);
      }
      Loaded<T, N, P> even, odd;
      if (shift) {
        odd.load(at, t0 == 0 && p.prev ? row.before_first() : row.x_at(t0 - 1));
        shifts.load(row, t0 + at.lane);
      }
      for (int i = 0;;) {  // two steps a round, so that what the next step needs need not be moved
        advance(0, i, odd, even);
        if (++i == run) break;
        advance(1, i, even, odd);
        if (++i == run) break;
        ring.slots.next_pair();
        if (kRotate) angles.slots.next_pair();
      }
    }
  }
}

// The sum over the warps of a block, of each warp's sum over its teams: heads that share a weight meet.
template <int N, int P, class At, class A>
__device__ void leave_shared_gradient(const At& at, Values<A, N, P>& dw, A* columns, A* partial) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  A* own = columns + thread / 32 * at.dim;
  dw.each([&](int part, int k) {
    for (int mask = at.lanes(); mask < 32; mask *= 2) {
      dw.v[part][k] += __shfl_xor_sync(0xffffffffU, dw.v[part][k], mask);
    }
  });
  if (thread % 32 < at.lanes()) dw.store(at, own + at.offset(0, 0));
  __syncthreads();
  for (int i = thread; i < at.dim; i += threads) {
    A total = columns[i];
    for (int warp = 1; warp < threads / 32; ++warp) total += columns[warp * at.dim + i];
    partial[i] = total;
  }
}

// What the block's runs of each head have, added up in their order.
template <int N, int P, class Params, class At, class A>
__device__ void leave_head_gradients(const Params& p, const At& at, Values<A, N, P>& dw, A* columns, A* partial) {
  const int block_heads = blockDim.x / at.lanes(), first_head = blockIdx.y * block_heads;
  A* own = columns + (threadIdx.x / at.lanes()) * at.dim + at.offset(0, 0);
  for (int turn = 0; turn < blockDim.y; ++turn) {
    if (at.has_head && threadIdx.y == turn) {
      if (turn) dw.add(at, own);
      dw.store(at, own);
    }
    __syncthreads();
  }
  const int columns_here = min(block_heads, static_cast<int>(p.heads) - first_head) * at.dim;
  A* row = partial + first_head * at.dim;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int i = thread; i < columns_here; i += blockDim.x * blockDim.y) row[i] = columns[i];
}

// The block's share of the weight's gradient.
template <int N, int P, class Params, class At, class A>
__device__ void leave_weight_gradient(const Params& p, const At& at, Values<A, N, P>& dw, void* shared, A* partial) {
  A* columns = static_cast<A*>(shared);
  const int64_t block = blockIdx.z * static_cast<int64_t>(gridDim.x) + blockIdx.x;
  __syncthreads();
  if (p.weight_stride) {
    leave_head_gradients(p, at, dw, columns, partial + block * p.heads * at.dim);
  } else {
    leave_shared_gradient(at, dw, columns, partial + (block * gridDim.y + blockIdx.y) * at.dim);
  }
}

// g, the gradient of the norm's result, becomes that of its argument u divided by r, which is what the norm multiplies
// u with; dw gets the token's share if it is the team's own. Returns Σ g d, the gradient of what moves u along d
// divided by r: its sum is taken beside the other two, not after them.
template <bool kShift, int N, int P, class At, class A>
__device__ __forceinline__ A through_norm(const At& at, A eps, const Values<A, N, P>& w, const Values<A, N, P>& u,
                                          const Values<A, N, P>& d, bool own, Values<A, N, P>& g, Values<A, N, P>& dw,
                                          A& r) {
  const A inverse_dim = A(1) / at.dim;
  A uu = 0, ug = 0, ud = 0, gd = 0;
  g.each([&](int part, int k) {
    if (P > 1 && !at.has(part, k / N)) return;
    const A gw = g.v[part][k] * w.v[part][k];
    uu += u.v[part][k] * u.v[part][k];
    ug += u.v[part][k] * gw;
    if (kShift) ud += u.v[part][k] * d.v[part][k], gd += gw * d.v[part][k];
  });
  if (P == 1 && !at.has(0, 0)) uu = ug = ud = gd = 0;
  r = rsqrt(sum_lanes(uu, at.lanes()) * inverse_dim + eps);
  const A pull = sum_lanes(ug, at.lanes()) * r * r * inverse_dim;
  const A along = kShift ? sum_lanes(gd, at.lanes()) - pull * sum_lanes(ud, at.lanes()) : A(0);
  const A counted = own ? r : A(0);
  g.each([&](int part, int k) {
    dw.v[part][k] += u.v[part][k] * counted * g.v[part][k];
    g.v[part][k] = g.v[part][k] * w.v[part][k] - u.v[part][k] * pull;
  });
  return along;
}

template <class T, class A, int N, int P, int kLanes, bool kShift, bool kNorm, bool kRotate>
__global__ void __launch_bounds__(kBlock, P > 1 ? 1 : 3)
    backward(AttnInputParams<T, A> p, const T* dy, AttnInputGradients<T, A> out, int lane_bits, int run) {
  extern __shared__ __align__(16) unsigned char shared[];
  using V = Values<A, N, P>;
  const Place<N, P, kLanes> at(p, lane_bits);
  const bool shift = kShift && (P == 1 || p.shift), norm = kNorm && (P == 1 || p.weight);
  const int token_bytes = static_cast<int>(p.heads * p.dim * sizeof(T));
  Ring<T, 2> ring(shared);
  Angles<A, N, P> angles(p, at, shared + ring.kBytes + (kNorm ? Weight<A, N, P>::kBytes : 0));
  V dw = {};
  ptx::wait_for_previous_kernel();
  const Weight<A, N, P> weight(at, norm ? p.weight + at.head * p.weight_stride + at.offset(0, 0) : nullptr,
                               shared + ring.kBytes);
  for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
    const Row<T, A> row(p, b, at.head, at.offset(0, 0));
    const int64_t origin = b * p.time * p.heads + at.head;  // of the head in (B, T, H)
    const T* dy_row = dy + origin * p.dim + at.offset(0, 0);
    T* dx_row = out.dx + origin * p.dim + at.offset(0, 0);
    const T* before_first = row.before_first();
    asm volatile("" : "+l"(before_first));  // or the compiler would work it out anew in every step
    for (int first = blockIdx.x * blockDim.y * run; first <= row.last; first += gridDim.x * blockDim.y * run) {
      // With a shift, the token behind the run passes its gradient on to the run's last.
      const int steps = run + (shift ? 1 : 0), t0 = first + threadIdx.y * run, start = t0 + steps - 1;
      const int end = at.has_head ? min(t0 + run, row.last + 1) : 0;  // of the tokens that are the team's own
      const auto x_of = [&](int t) { return row.x_at(shift ? t - 1 : t); };
      const auto dy_of = [&](int t) { return token(dy_row, min(t, row.last), token_bytes); };
      const auto fetch = [&](int step, int i) {
        if (i < steps) {
          const int t = start - i;
          ring.copy(step, 0, x_of(t), at.step(1, 0));
          ring.copy(step, 1, dy_of(t), at.step(1, 0));
          if (kRotate) angles.copy(step, t);
        }
        commit_step();
      };
      Shifts<T, A> shifts;
      A pass = 0;           // how much of the gradient behind the token comes to it
      bool passes = false;  // or none
      // now: x_t with a shift, which the step before has left; x: x_{t-1} with a shift, or x_t. behind: the gradient of
      // the token behind; g: of this one.
      const auto advance = [&](int step, int i, const Loaded<T, N, P>& now, Loaded<T, N, P>& x, const V& behind, V& g) {
        const int t = start - i;
        const bool own = t < end;
        A alpha = 0;
        bool has_before = false;
        if (shift) {
          const int turn = i & (at.lanes() - 1);
          if (turn == 0) {
            shifts.take(row, t - at.lane, at.lanes());
            shifts.load(row, t - at.lanes() - at.lane);
          }
          alpha = shifts.next(turn, at.lanes(), has_before);
        }
        Loaded<T, N, P> dy_t;
        if constexpr (P == 1) {
          wait_for_step();
          if (kRotate) __syncwarp();  // the angles come by other threads' copies
          ring.get(step, 0, x);
          ring.get(step, 1, dy_t);
          if (kRotate) angles.get(step);
          fetch(step + kAhead, i + kAhead);
        } else {
          x.load(at, x_of(t));
          dy_t.load(at, dy_of(t));
          if (kRotate) angles.load(at, t);
        }
        if (shift && t == 0 && p.prev) x.load(at, before_first);
        V w, u, d;
        g.each([&](int part, int k) { g.v[part][k] = dy_t.get(part, k); });
        if (kRotate) angles.turn(-1, g);
        if (shift) {
          mix(x, has_before, now, alpha, d, u);
        } else {
          u.each([&](int part, int k) { u.v[part][k] = x.get(part, k); });
        }
        A dalpha = 0, r = 1;
        if (norm) {
          weight.get(at, w);
          dalpha = through_norm<kShift>(at, p.eps, w, u, d, own, g, dw, r);
          dalpha *= r;
        } else if (shift) {
          dalpha = V::sum(at, [&](int part, int k) { return g.v[part][k] * d.v[part][k]; });
        }
        T* dx = token(dx_row, t, token_bytes);
        const A stay = 1 - alpha, keep = stay * r;
        u.each([&](int part, int k) {
          u.v[part][k] = keep * g.v[part][k];
          if (shift && passes) u.v[part][k] += pass * behind.v[part][k];
        });
        if (own) u.store(at, dx);
        if (!shift) return;
        if (own && at.lane == 0) {
          *token(out.dshift + origin, t, static_cast<int>(p.heads * sizeof(T))) =
              from_compute<T>(p.shift_is_logit ? dalpha * alpha * stay : dalpha);
        }
        pass = alpha * r, passes = has_before;
      };
      if constexpr (P == 1) {
        if (kRotate) __syncwarp();  // others may still read the angles of the run before, whose slots these are
        for (int i = 0; i < kAhead; ++i) fetch(i, i);
      }
      Loaded<T, N, P> even, odd;
      V even_g, odd_g;
      if (shift) {
        odd.load(at, row.x_at(start));
        shifts.load(row, start - at.lane);
      }
      const auto leave = [&](V& g) {
        if (!out.dprev || t0 > 0 || !at.has_head) return;
        g.each([&](int part, int k) { g.v[part][k] *= pass; });
        g.store(at, out.dprev + row.in_heads());
      };
      for (int i = 0;;) {  // two steps a round, so that what the next step needs need not be moved
        advance(0, i, odd, even, odd_g, even_g);
        if (++i == steps) {
          leave(even_g);
          break;
        }
        advance(1, i, even, odd, even_g, odd_g);
        if (++i == steps) {
          leave(odd_g);
          break;
        }
        ring.slots.next_pair();
        if (kRotate) angles.slots.next_pair();
      }
    }
  }
  ptx::start_next_kernel();
  if (kNorm && out.partial) leave_weight_gradient(p, at, dw, shared, out.partial);
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
  if constexpr (sizeof(T) == 2) {
    if (p.dim == 64) return f.template operator()<N, 1, 64 / (2 * N)>();
    if (p.dim == 128) return f.template operator()<N, 1, 128 / (2 * N)>();
  }
  return f.template operator()<N, 1, 0>();
}
template <class T, class A>
auto forward_kernel(const AttnInputParams<T, A>& p) {
  return with_layout(p, [&]<int N, int P, int kLanes>() {
    const auto pick = [&]<bool kShift, bool kNorm>() {
      return p.cos ? forward<T, A, N, P, kLanes, kShift, kNorm, true>
                   : forward<T, A, N, P, kLanes, kShift, kNorm, false>;
    };
    if (P > 1 || (p.shift && p.weight)) return pick.template operator()<true, true>();
    if (p.shift) return pick.template operator()<true, P != 1>();
    return p.weight ? pick.template operator()<P != 1, true>() : pick.template operator()<P != 1, P != 1>();
  });
}
template <class T, class A>
auto backward_kernel(const AttnInputParams<T, A>& p) {
  return with_layout(p, [&]<int N, int P, int kLanes>() {
    const auto pick = [&]<bool kShift, bool kNorm>() {
      return p.cos ? backward<T, A, N, P, kLanes, kShift, kNorm, true>
                   : backward<T, A, N, P, kLanes, kShift, kNorm, false>;
    };
    if (P > 1 || (p.shift && p.weight)) return pick.template operator()<true, true>();
    return p.shift ? pick.template operator()<true, P != 1>() : pick.template operator()<P != 1, true>();
  });
}

/// How a kernel is launched: every thread that the device holds at once has as many tokens, in runs of a length within
/// bounds.
struct Launch {
  dim3 grid;
  int run;
  size_t shared;

  template <class Kernel, class T, class A>
  Launch(Kernel kernel, size_t least_shared, const AttnInputParams<T, A>& p, const Shape& shape) {
    constexpr int64_t kShortest = 4, kLongest = 128;
    shared = least_shared;
    if (shared > 48 * 1024) {  // more than a kernel has without asking
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
    }
    const int64_t resident = resident_blocks(kernel, shape.threads.x * shape.threads.y, shared);
    const int64_t places = std::max<int64_t>(resident * shape.threads.y / (shape.slices * shape.batch), 1);
    const int64_t tokens = (p.time + places - 1) / places, rounds = (tokens + kLongest - 1) / kLongest;
    run = static_cast<int>(std::max(kShortest, (tokens + rounds - 1) / rounds));
    grid = dim3(shape.along(p.time, run, resident), shape.slices, shape.batch);
  }
};
template <class T, class A>
size_t angle_bytes(const AttnInputParams<T, A>& p, const Shape& shape) {
  if (!p.cos || !is_wide(p)) return 0;
  return kSlots *
         Angles<A, kVec<T>, 1>::slot_size(shape.threads.x, shape.threads.x * shape.threads.y, 1 << shape.lane_bits);
}
template <class T, class A>
Launch launch_backward(const AttnInputParams<T, A>& p, const Shape& shape) {
  const unsigned teams = shape.threads.x >> shape.lane_bits, warps = shape.threads.x * shape.threads.y / 32;
  const size_t columns = p.weight ? std::max(teams, warps) * p.dim * sizeof(A) : 0;
  const size_t ahead = is_wide(p) ? Ring<T, 2>::kBytes + (p.weight ? Weight<A, kVec<T>, 1>::kBytes : 0) : 0;
  return {backward_kernel(p), std::max(columns, ahead + angle_bytes(p, shape)), p, shape};
}

}  // namespace

template <class T, class A>
cudaError_t attn_input(const AttnInputParams<T, A>& p, T* y, cudaStream_t stream) {
  if (p.batch * p.time * p.heads * p.dim == 0) return cudaSuccess;
  const Shape shape = shape_of(p);
  const auto kernel = forward_kernel(p);
  const Launch launch(kernel, is_wide(p) ? Ring<T, 1>::kBytes + angle_bytes(p, shape) : 0, p, shape);
  return launch_early(kernel, launch.grid, shape.threads, static_cast<int>(launch.shared), stream, p, y,
                      shape.lane_bits, launch.run);
}

template <class T, class A>
int64_t attn_input_backward_partials(const AttnInputParams<T, A>& p) {
  const Shape shape = shape_of(p);
  const dim3 grid = launch_backward(p, shape).grid;
  return static_cast<int64_t>(grid.x) * grid.z * (p.weight_stride ? 1 : grid.y);
}

template <class T, class A>
cudaError_t attn_input_backward(const AttnInputParams<T, A>& p, const T* dy, const AttnInputGradients<T, A>& gradients,
                                cudaStream_t stream) {
  if (p.batch * p.time * p.heads * p.dim == 0) return cudaSuccess;
  const Shape shape = shape_of(p);
  const Launch launch = launch_backward(p, shape);
  return launch_early(backward_kernel(p), launch.grid, shape.threads, static_cast<int>(launch.shared), stream, p, dy,
                      gradients, shape.lane_bits, launch.run);
}

}  // namespace fox::cuda

/// One file a dtype: each takes a minute to compile.
#define FOX_INSTANTIATE_ATTN_INPUT(T)                                                                      \
  template cudaError_t attn_input<T, Compute<T>>(const AttnInputParams<T, Compute<T>>&, T*, cudaStream_t); \
  template int64_t attn_input_backward_partials<T, Compute<T>>(const AttnInputParams<T, Compute<T>>&);     \
  template cudaError_t attn_input_backward<T, Compute<T>>(const AttnInputParams<T, Compute<T>>&, const T*, \
                                                          const AttnInputGradients<T, Compute<T>>&, cudaStream_t);
