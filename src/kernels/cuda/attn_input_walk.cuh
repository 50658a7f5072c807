#pragma once

#include "kernels/cuda/attn_input.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/vec.cuh"

// attn_input for what training is made of: bfloat16, heads of 64 or 128.
//
// A team of kLanes lanes has one head over a run of tokens. A lane holds eight elements, a 16-byte piece, of each half
// of its head, which is what rotary turns together; the mean of squares is a sum over the team's lanes. The device
// holds all runs at once, so that they are long. Forward walks a run from its first token, backward from its last:
// token t's gradient needs that of t + 1, which the step before has just made, and x_{t-1}, which the next step needs
// as its own. So a run reads one token more on either side, computes one more backward, and reads no token twice.
//
// Backward's registers, 128 a thread, leave an SM 15 warps to hide one head's sums behind another's work. So that there
// are no more, tokens come through shared memory, two steps ahead of their use. Boundaries of documents are branches
// that are taken rarely. Threads that stand outside of the tensor read what its last head or token has and store
// nothing.
namespace fox::cuda {
namespace {
namespace walk {

using T = __nv_bfloat16;
using Params = AttnInputParams<T, float>;
using Gradients = AttnInputGradients<T, float>;

constexpr int kBlock = 128, kPiece = kVec<T>;

// The place of a thread. threadIdx.x: heads side by side, each a team; threadIdx.y: runs side by side; blockIdx: runs,
// slices of heads, rows of the batch.
template <int kLanes>
struct Place {
  static constexpr int kHalf = kPiece * kLanes, kDim = 2 * kHalf;
  int lane, head, offset;  // offset: of the lane's first piece in its head
  bool has_head;

  __device__ explicit Place(const Params& p) : lane(threadIdx.x & (kLanes - 1)), offset(lane * kPiece) {
    const int own = blockIdx.y * (blockDim.x / kLanes) + threadIdx.x / kLanes;
    const int last = static_cast<int>(p.heads) - 1;
    has_head = own <= last;
    head = min(own, last);
  }
};

// One token's elements of a lane as they lie in memory, and as they are computed with.
struct Loaded {
  Raw<T, kPiece> piece[2];
  __device__ __forceinline__ float get(int part, int k) const { return piece[part][k]; }
};

struct Values {
  float v[2][kPiece];

  // Calls f(part, k) for each element.
  template <class F>
  static __device__ __forceinline__ void each(const F& f) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) f(part, k);
    }
  }
  // The sum of f(part, k) over the head.
  template <class F>
  static __device__ __forceinline__ float sum(int lanes, const F& f) {
    float total = 0;
    each([&](int part, int k) { total += f(part, k); });
    return sum_lanes(total, lanes);
  }
  // p: the lane's first piece, the other `half` elements on.
  __device__ __forceinline__ void load(const float* p, int half) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Vec<float, kPiece> piece;
      piece.load(p + part * half);
#pragma unroll
      for (int k = 0; k < kPiece; ++k) v[part][k] = piece.v[k];
    }
  }
  template <class U>
  __device__ __forceinline__ void store(U* p, int half) const {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      Vec<U, kPiece> piece;
#pragma unroll
      for (int k = 0; k < kPiece; ++k) piece.v[k] = v[part][k];
      piece.store(p + part * half);
    }
  }
};

// The token t of a tensor whose tokens lie `bytes` apart.
template <class U>
__device__ __forceinline__ U* token(U* base, int t, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<U>, const char, char>;
  return reinterpret_cast<U*>(reinterpret_cast<Byte*>(base) + static_cast<int64_t>(t) * bytes);
}

// How a token is shifted, as it lies in memory: loaded a step ahead of its use.
struct Shift {
  T alpha;
  bool begins = false;
};

// The tokens of one head in one row of the batch. Strides of a token fit 32 bits in bytes, offsets do not.
struct Row {
  const T *x, *prev, *shift;  // of token 0; of what stands before it, or of anything
  const bool* begins;
  int last, x_bytes, shift_bytes;
  bool has_prev, shift_is_logit;

  __device__ Row(const Params& p, int64_t b, int head, int offset)
      : x(p.x + b * p.x_batch + head * p.x_head + offset),
        prev(p.prev ? p.prev + (b * p.heads + head) * p.dim + offset : x),
        shift(p.shift + b * p.shift_batch + head),
        begins(p.begins ? p.begins + b * p.time : nullptr),
        last(static_cast<int>(p.time) - 1),
        x_bytes(static_cast<int>(p.x_time * sizeof(T))),
        shift_bytes(static_cast<int>(p.shift_time * sizeof(T))),
        has_prev(p.prev != nullptr),
        shift_is_logit(p.shift_is_logit) {}
  // Of the last token instead of one behind it; of prev for t < 0.
  __device__ const T* x_at(int t) const { return t < 0 ? prev : token(x, min(t, last), x_bytes); }
  __device__ void load(int t, Shift& s) const {
    t = max(min(t, last), 0);
    s.alpha = *token(shift, t, shift_bytes);
    if (begins) s.begins = begins[t];
  }
  // Whether token t has something before it; it may be prev.
  __device__ bool continues(int t, const Shift& s) const { return t > 0 ? t <= last && !s.begins : has_prev; }
  __device__ float alpha(const Shift& s) const {
    const float a = to_compute(s.alpha);
    return shift_is_logit ? sigmoid<T>(a) : a;
  }
};

// The angles of a token's pairs.
struct Angles {
  Vec<float, kPiece> cos, sin;

  __device__ __forceinline__ void load(const Params& p, int half, int offset, int t) {
    const int bytes = half * static_cast<int>(sizeof(float));
    cos.load(token(p.cos + offset, t, bytes));
    sin.load(token(p.sin + offset, t, bytes));
  }
  // The pairs turned by the angles times `way`, 1 or -1.
  __device__ __forceinline__ void turn(float way, Values& x) const {
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      float &low = x.v[0][k], &high = x.v[1][k];
      const float c = cos.v[k], s = way * sin.v[k], turned = low * c - high * s;
      high = low * s + high * c;
      low = turned;
    }
  }
};

// Makes what stands beside it a branch: the compiler would otherwise compute both sides for every element.
__device__ __forceinline__ void rarely() { asm volatile(""); }

// Tokens on their way through shared memory. A thread reads nothing but what it has copied itself, so there is no
// barrier. A slot has a lane's two pieces of each tensor; beside those of this step and those on their way stands that
// of the step before.
template <int kTensors>
struct Ring {
  static constexpr int kAhead = 2, kSlots = 4, kBytesOfPieces = 16 * kBlock, kSlot = 2 * kTensors * kBytesOfPieces;
  static constexpr int kBytes = kSlots * kSlot;
  uint32_t base, slot = 0;

  __device__ explicit Ring(const void* shared)
      : base(ptx::smem_u32(shared) + (threadIdx.y * blockDim.x + threadIdx.x) * 16) {}
  __device__ __forceinline__ uint32_t at(int steps, int tensor) const {
    return base + (slot + steps * kSlot) % kBytes + 2 * tensor * kBytesOfPieces;
  }
  // The pieces of a tensor `steps` ahead; p is the first, the second `half` elements on.
  __device__ __forceinline__ void copy(int steps, int tensor, const T* p, int half) const {
    const uint32_t to = at(steps, tensor);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(p) : "memory");
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + kBytesOfPieces), "l"(p + half) : "memory");
  }
  __device__ __forceinline__ void commit() const { asm volatile("cp.async.commit_group;" ::: "memory"); }
  __device__ __forceinline__ void wait() const { asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory"); }
  __device__ __forceinline__ void advance() { slot = (slot + kSlot) % kBytes; }
  __device__ __forceinline__ void get(int steps, int tensor, Loaded& to) const {
    const uint32_t from = at(steps, tensor);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint4& w = to.piece[part].word;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                   : "r"(from + part * kBytesOfPieces)
                   : "memory");
    }
  }
};

// α x_{t-1} + (1 - α) x_t = x_t + α d with d = x_{t-1} - x_t, or -x_t where nothing stands before it. Nothing is
// multiplied by 0: what a boundary hides may be NaN.
__device__ __forceinline__ void mix(const Loaded& before, const Loaded& now, float alpha, bool continues, Values& d,
                                    Values& mixed) {
  d.each([&](int part, int k) { d.v[part][k] = before.get(part, k) - now.get(part, k); });
  if (!continues) {
    rarely();
    d.each([&](int part, int k) { d.v[part][k] = -now.get(part, k); });
  }
  d.each([&](int part, int k) { mixed.v[part][k] = now.get(part, k) + alpha * d.v[part][k]; });
}

// kShift, kNorm, kRotate: what is asked for.
template <int kLanes, bool kShift, bool kNorm, bool kRotate>
__global__ void __launch_bounds__(kBlock, 5) forward(Params p, T* y, int run) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Place<kLanes> at(p);
  constexpr int kHalf = at.kHalf;
  constexpr float kInverseDim = 1.0F / at.kDim;
  const float way = p.inverse ? -1 : 1;
  const int y_bytes = static_cast<int>(p.heads * p.dim * sizeof(T));
  Ring<1> ring(shared);
  ptx::wait_for_previous_kernel();
  Values w;
  if (kNorm) w.load(p.weight + at.head * p.weight_stride + at.offset, kHalf);
  for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
    const Row row(p, b, at.head, at.offset);
    T* y_row = y + (b * p.time * p.heads + at.head) * p.dim + at.offset;
    for (int first = blockIdx.x * blockDim.y * run; first <= row.last; first += gridDim.x * blockDim.y * run) {
      const int t0 = first + threadIdx.y * run, end = t0 + run;
      const auto fetch = [&](int steps, int t) {
        if (t < end) ring.copy(steps, 0, row.x_at(t), kHalf);
        if (steps >= 0) ring.commit();
      };
      if (kShift) fetch(-1, t0 - 1);
      for (int ahead = 0; ahead < ring.kAhead; ++ahead) fetch(ahead, t0 + ahead);
      Shift how, how_ahead;
      if (kShift) row.load(t0, how);
      for (int t = t0; t < end; ++t) {
        Angles angles;
        if (kRotate) angles.load(p, kHalf, at.offset, min(t, row.last));
        if (kShift) row.load(t + 1, how_ahead);
        Loaded now, before;
        ring.wait();
        ring.get(0, 0, now);
        if (kShift) ring.get(-1, 0, before);
        fetch(ring.kAhead, t + ring.kAhead);
        ring.advance();
        Values v;
        v.each([&](int part, int k) { v.v[part][k] = now.get(part, k); });
        if (kShift) {
          const float alpha = row.alpha(how), stay = 1 - alpha;
          v.each([&](int part, int k) { v.v[part][k] *= stay; });
          if (row.continues(t, how)) v.each([&](int part, int k) { v.v[part][k] += alpha * before.get(part, k); });
          how = how_ahead;
        }
        if (kNorm) {
          const float squares = v.sum(kLanes, [&](int part, int k) { return v.v[part][k] * v.v[part][k]; });
          const float r = rsqrt(squares * kInverseDim + p.eps);
          v.each([&](int part, int k) { v.v[part][k] *= r * w.v[part][k]; });
        }
        if (kRotate) angles.turn(way, v);
        if (at.has_head && t <= row.last) v.store(token(y_row, t, y_bytes), kHalf);
      }
    }
  }
}

// The sum over the warps of a block, of each warp's sum over its teams: heads that share a weight meet.
template <int kLanes>
__device__ void leave_shared_gradient(const Place<kLanes>& at, Values& dw, float* columns, float* partial) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  float* own = columns + thread / 32 * at.kDim;
  dw.each([&](int part, int k) {
    for (int mask = kLanes; mask < 32; mask *= 2) dw.v[part][k] += __shfl_xor_sync(0xffffffffU, dw.v[part][k], mask);
  });
  if (thread % 32 < kLanes) dw.store(own + at.offset, at.kHalf);
  __syncthreads();
  for (int i = thread; i < at.kDim; i += threads) {
    float total = columns[i];
    for (int warp = 1; warp < threads / 32; ++warp) total += columns[warp * at.kDim + i];
    partial[i] = total;
  }
}

// What the block's runs of each head have, added up in their order.
template <int kLanes>
__device__ void leave_head_gradients(const Params& p, const Place<kLanes>& at, Values& dw, float* columns,
                                     float* partial) {
  const int block_heads = blockDim.x / kLanes, first_head = blockIdx.y * block_heads;
  float* own = columns + (threadIdx.x / kLanes) * at.kDim + at.offset;
  for (int turn = 0; turn < blockDim.y; ++turn) {
    if (at.has_head && threadIdx.y == turn) {
      if (turn) {
        Values before;
        before.load(own, at.kHalf);
        dw.each([&](int part, int k) { dw.v[part][k] += before.v[part][k]; });
      }
      dw.store(own, at.kHalf);
    }
    __syncthreads();
  }
  const int columns_here = min(block_heads, static_cast<int>(p.heads) - first_head) * at.kDim;
  float* row = partial + first_head * at.kDim;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int i = thread; i < columns_here; i += blockDim.x * blockDim.y) row[i] = columns[i];
}

// The block's share of the weight's gradient.
template <int kLanes>
__device__ void leave_weight_gradient(const Params& p, const Place<kLanes>& at, Values& dw, void* shared,
                                      float* partial) {
  float* columns = static_cast<float*>(shared);
  const int64_t block = blockIdx.z * static_cast<int64_t>(gridDim.x) + blockIdx.x;
  __syncthreads();
  if (p.weight_stride) {
    leave_head_gradients(p, at, dw, columns, partial + block * p.heads * at.kDim);
  } else {
    leave_shared_gradient(at, dw, columns, partial + (block * gridDim.y + blockIdx.y) * at.kDim);
  }
}

// g, the gradient of the norm's result, becomes that of its argument u; dw gets the token's share if it is the team's
// own. Returns the sum of g d over the head, with a shift: from sums taken beside those of the norm, not after them.
template <int kLanes, bool kShift>
__device__ __forceinline__ float through_norm(float eps, const Values& w, const Values& u, const Values& d, bool own,
                                              Values& g, Values& dw) {
  constexpr float kInverseDim = 1.0F / Place<kLanes>::kDim;
  float uu = 0, ug = 0, gd = 0, ud = 0, along = 0;
  g.each([&](int part, int k) {
    const float gw = g.v[part][k] * w.v[part][k];
    uu += u.v[part][k] * u.v[part][k];
    ug += u.v[part][k] * gw;
    if (kShift) gd += gw * d.v[part][k], ud += u.v[part][k] * d.v[part][k];
  });
  const float r = rsqrt(sum_lanes(uu, kLanes) * kInverseDim + eps);
  const float pull = sum_lanes(ug, kLanes) * r * r * kInverseDim;
  if (kShift) along = r * (sum_lanes(gd, kLanes) - pull * sum_lanes(ud, kLanes));
  g.each([&](int part, int k) {
    const float normed = u.v[part][k] * r, gw = g.v[part][k] * w.v[part][k];
    if (own) dw.v[part][k] += normed * g.v[part][k];
    g.v[part][k] = gw * r - normed * pull;
  });
  return along;
}

template <int kLanes, bool kShift, bool kNorm, bool kRotate>
__global__ void __launch_bounds__(kBlock, 4) backward(Params p, const T* dy, Gradients out, int run) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Place<kLanes> at(p);
  constexpr int kHalf = at.kHalf;
  const int token_bytes = static_cast<int>(p.heads * p.dim * sizeof(T));
  Ring<2> ring(shared);
  Values dw = {};
  ptx::wait_for_previous_kernel();
  for (int64_t b = blockIdx.z; b < p.batch; b += gridDim.z) {
    const Row row(p, b, at.head, at.offset);
    const int64_t origin = b * p.time * p.heads + at.head;  // of the head in (B, T, H)
    const T* dy_row = dy + origin * p.dim + at.offset;
    T* dx_row = out.dx + origin * p.dim + at.offset;
    for (int first = blockIdx.x * blockDim.y * run; first <= row.last; first += gridDim.x * blockDim.y * run) {
      const int t0 = first + threadIdx.y * run, end = min(t0 + run, row.last + 1);
      const auto fetch = [&](int steps, int t) {
        if (t >= t0) {
          ring.copy(steps, 0, row.x_at(kShift ? t - 1 : t), kHalf);
          ring.copy(steps, 1, token(dy_row, min(t, row.last), token_bytes), kHalf);
        }
        ring.commit();
      };
      // With a shift, the token behind the run passes its gradient on to the run's last.
      int t = t0 + (kShift ? run : run - 1);
      if (kShift) ring.copy(-1, 0, row.x_at(t), kHalf);
      for (int ahead = 0; ahead < ring.kAhead; ++ahead) fetch(ahead, t - ahead);
      Shift how, how_ahead;
      if (kShift) row.load(t, how);
      Values passed_on = {};  // α times the gradient of the token behind
      for (; t >= t0; --t) {
        const bool own = at.has_head && t < end;
        Angles angles;
        if (kRotate) angles.load(p, kHalf, at.offset, min(t, row.last));
        Values w;
        if (kNorm) w.load(p.weight + at.head * p.weight_stride + at.offset, kHalf);
        if (kShift) row.load(t - 1, how_ahead);
        Loaded x, now, dy_t;  // x_{t-1} and x_t with a shift
        ring.wait();
        ring.get(0, 0, x);
        ring.get(0, 1, dy_t);
        if (kShift) ring.get(-1, 0, now);
        fetch(ring.kAhead, t - ring.kAhead);
        ring.advance();
        Values g, u, d;
        float alpha = 0, dalpha = 0;
        bool continues = false;
        if (kShift) {
          alpha = row.alpha(how), continues = row.continues(t, how), how = how_ahead;
          mix(x, now, alpha, continues, d, u);
        } else {
          u.each([&](int part, int k) { u.v[part][k] = x.get(part, k); });
        }
        g.each([&](int part, int k) { g.v[part][k] = dy_t.get(part, k); });
        if (kRotate) angles.turn(-1, g);
        if (kNorm) {
          dalpha = through_norm<kLanes, kShift>(p.eps, w, u, d, own, g, dw);
        } else if (kShift) {
          dalpha = g.sum(kLanes, [&](int part, int k) { return g.v[part][k] * d.v[part][k]; });
        }
        T* dx = token(dx_row, t, token_bytes);
        if (!kShift) {
          if (own) g.store(dx, kHalf);
          continue;
        }
        const float stay = 1 - alpha;
        u.each([&](int part, int k) {
          u.v[part][k] = stay * g.v[part][k] + passed_on.v[part][k];
          passed_on.v[part][k] = alpha * g.v[part][k];
        });
        if (own) {
          u.store(dx, kHalf);
          if (at.lane == 0) {
            *token(out.dshift + origin, t, static_cast<int>(p.heads * sizeof(T))) =
                from_compute<T>(row.shift_is_logit ? dalpha * alpha * stay : dalpha);
          }
        }
        if (t == 0 && out.dprev && own) {
          rarely();
          passed_on.store(out.dprev + (b * p.heads + at.head) * p.dim + at.offset, kHalf);
        }
        if (!continues) {
          rarely();
          passed_on = {};
        }
      }
    }
  }
  ptx::start_next_kernel();
  if (kNorm && out.partial) leave_weight_gradient(p, at, dw, shared, out.partial);
}

}  // namespace walk
}  // namespace
}  // namespace fox::cuda
