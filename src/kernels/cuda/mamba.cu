// Mamba's selective scan (arXiv 2312.00752): every channel and state decays by itself, so there is no matrix product to
// be had; exponentials (16 a token and channel and pass) are what it costs. A thread owns a channel, its 16 states in
// registers, and 64 tokens:
//   summary   what a chunk leaves of a state of 0, and the sum of its time steps, for all chunks at once
//   link      the state before each chunk: S_{c+1} = exp(a Σdt) S_c + summary_c (elementwise)
//   output    the chunks again, each from the right state
//   backward  the same in reverse for the gradient behind each chunk; then each chunk forward, leaving its state every
//             8 tokens in shared memory, and backward with those 8 tokens' states in registers: two lanes a channel,
//             8 states each, since registers are what keeps warps out and waiting is what is left to hide
#include "kernels/cuda/mamba.h"
#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {
namespace {

constexpr int kN = kMambaStates, kTokens = 64, kThreads = kMambaChannelBlock, kSteps = 8, kParts = kTokens / kSteps;
constexpr float kLog2E = 1.4426950408889634f;

struct Args {
  MambaParams p;
  MambaGradients g;
  __nv_bfloat16* y;
  float *before, *behind;  // (B, chunks, I, 16): summaries first, then states and gradients of states
  float* time;             // (B, chunks, I): Σ dt, or infinite where the chunk forgets what is before it
  int64_t chunks;
};

/// A thread's channel and chunk.
struct Place {
  int64_t i, chunk, t0, index;  // index: of (batch, chunk, channel)
  int b, count;
  bool exists;

  /// channel: of those of the block.
  __device__ __forceinline__ Place(const Args& a, int channel) {
    i = int64_t(blockIdx.x) * kThreads + channel, chunk = blockIdx.y, b = blockIdx.z, t0 = chunk * kTokens;
    count = static_cast<int>(min(int64_t(kTokens), a.p.length - t0));
    exists = i < a.p.channels;
    index = (b * a.chunks + chunk) * a.p.channels + i;
  }
  __device__ __forceinline__ int64_t packed(const Args& a, int t) const {
    return (b * a.p.length + t0 + t) * a.p.channels + i;
  }
};

/// b and c of the chunk's tokens, and whether one starts a document.
struct Shared {
  float b[kTokens][kN], c[kTokens][kN];
  bool starts[kTokens];

  __device__ __forceinline__ void load(const Args& a, const Place& w) {
    for (int e = threadIdx.x; e < kTokens * kN; e += blockDim.x) {
      const int t = e / kN, n = e % kN;
      const bool valid = t < w.count;
      b[t][n] = valid ? __bfloat162float(a.p.b[w.b * a.p.b_batch + (w.t0 + t) * a.p.b_time + n]) : 0.f;
      c[t][n] = valid ? __bfloat162float(a.p.c[w.b * a.p.c_batch + (w.t0 + t) * a.p.c_time + n]) : 0.f;
    }
    if (threadIdx.x < kTokens)
      starts[threadIdx.x] = a.p.starts && threadIdx.x < w.count && a.p.starts[w.t0 + threadIdx.x];
    __syncthreads();
  }
};

template <int N>
__device__ __forceinline__ void read_states(float (&to)[N], const float* from) {
#pragma unroll
  for (int n = 0; n < N; n += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + n);
    to[n] = v.x, to[n + 1] = v.y, to[n + 2] = v.z, to[n + 3] = v.w;
  }
}
template <int N>
__device__ __forceinline__ void write_states(float* to, const float (&from)[N]) {
#pragma unroll
  for (int n = 0; n < N; n += 4)
    *reinterpret_cast<float4*>(to + n) = make_float4(from[n], from[n + 1], from[n + 2], from[n + 3]);
}

/// Decay rates (log2 units) of a channel's states from n0 on, and what a token does to them.
template <int N>
struct Channel {
  float a[N];
  __device__ __forceinline__ Channel(const Args& args, int64_t i, int n0 = 0) {
    read_states(a, args.p.a + i * kN + n0);
#pragma unroll
    for (int n = 0; n < N; ++n) a[n] *= kLog2E;
  }
  __device__ __forceinline__ float decay(float dt, int n, bool starts) const {
    return ptx::ex2(starts ? -INFINITY : dt * a[n]);  // a choice of operands: no branch around 16 exponentials
  }
  __device__ __forceinline__ void step(float (&h)[N], float dt, float x, const float (&b)[N], bool starts) const {
#pragma unroll
    for (int n = 0; n < N; ++n) h[n] = fmaf(decay(dt, n, starts), h[n], dt * x * b[n]);
  }
};

__device__ __forceinline__ float load_x(const Args& a, const Place& w, int t) {
  return __bfloat162float(a.p.x[w.b * a.p.x_batch + (w.t0 + t) * a.p.x_time + w.i]);
}

__global__ void __launch_bounds__(kThreads) summary_kernel(const __grid_constant__ Args a) {
  __shared__ __align__(16) Shared s;
  const Place w(a, threadIdx.x);
  s.load(a, w);
  if (!w.exists) return;
  const Channel<kN> channel(a, w.i);
  float h[kN] = {}, time = 0;
#pragma unroll 4
  for (int t = 0; t < w.count; ++t) {
    float b[kN];
    read_states(b, s.b[t]);
    const float dt = a.p.dt[w.packed(a, t)];
    channel.step(h, dt, load_x(a, w, t), b, s.starts[t]);
    time = s.starts[t] ? INFINITY : time + dt;
  }
  write_states(a.before + w.index * kN, h);
  a.time[w.index] = time;
}

// The gradient of the state before a chunk through its own outputs.
__global__ void __launch_bounds__(kThreads) summary_backward_kernel(const __grid_constant__ Args a) {
  __shared__ __align__(16) Shared s;
  const Place w(a, threadIdx.x);
  s.load(a, w);
  if (!w.exists) return;
  const Channel<kN> channel(a, w.i);
  float dh[kN] = {};
#pragma unroll 4
  for (int t = w.count - 1; t >= 0; --t) {
    float c[kN];
    read_states(c, s.c[t]);
    const float dt = a.p.dt[w.packed(a, t)], dy = __bfloat162float(a.g.dy[w.packed(a, t)]);
#pragma unroll
    for (int n = 0; n < kN; ++n) dh[n] = channel.decay(dt, n, s.starts[t]) * fmaf(c[n], dy, dh[n]);
  }
  write_states(a.behind + w.index * kN, dh);
}

// A thread a channel and state. In place: summary_c becomes the state before (behind, in reverse) chunk c.
template <bool kBackwards>
__global__ void __launch_bounds__(kThreads)
    link_kernel(const __grid_constant__ Args a, const float* first, float* last) {
  constexpr int kAhead = 8;
  const int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x, size = a.p.channels * kN;
  if (e >= size) return;
  const int64_t b = blockIdx.y;
  const float rate = a.p.a[e] * kLog2E;
  float* states = (kBackwards ? a.behind : a.before) + b * a.chunks * size + e;
  const float* time = a.time + b * a.chunks * a.p.channels + e / kN;
  float h = first[b * size + e];
  for (int64_t i0 = 0; i0 < a.chunks; i0 += kAhead) {
    float own[kAhead], dt[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i0 + i >= a.chunks) continue;
      const int64_t c = kBackwards ? a.chunks - 1 - i0 - i : i0 + i;
      own[i] = states[c * size], dt[i] = time[c * a.p.channels];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i0 + i >= a.chunks) continue;
      const int64_t c = kBackwards ? a.chunks - 1 - i0 - i : i0 + i;
      states[c * size] = h;
      h = fmaf(isinf(dt[i]) ? 0.f : ptx::ex2(rate * dt[i]), h, own[i]);
    }
  }
  last[b * size + e] = h;
}

__global__ void __launch_bounds__(kThreads) output_kernel(const __grid_constant__ Args a) {
  __shared__ __align__(16) Shared s;
  const Place w(a, threadIdx.x);
  s.load(a, w);
  if (!w.exists) return;
  const Channel<kN> channel(a, w.i);
  const float d = a.p.d[w.i];
  float h[kN];
  read_states(h, a.before + w.index * kN);
#pragma unroll 4
  for (int t = 0; t < w.count; ++t) {
    float b[kN], c[kN];
    read_states(b, s.b[t]), read_states(c, s.c[t]);
    const float x = load_x(a, w, t);
    channel.step(h, a.p.dt[w.packed(a, t)], x, b, s.starts[t]);
    float y = d * x;
#pragma unroll
    for (int n = 0; n < kN; ++n) y = fmaf(h[n], c[n], y);
    a.y[w.packed(a, t)] = __float2bfloat16(y);
  }
}

/// N values in each of N lanes, which differ in the lowest bits of their number → lane l has the sum of value l over
/// these lanes, in N - 1 shuffles.
template <int N>
__device__ __forceinline__ float transposing_sum(const float (&v)[N]) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    const bool upper = threadIdx.x & N / 2;
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float sent = upper ? v[i] : v[i + N / 2], kept = upper ? v[i + N / 2] : v[i];
      half[i] = kept + __shfl_xor_sync(0xffffffffu, sent, N / 2);
    }
    return transposing_sum(half);
  }
}

// A warp has 16 channels: lanes 0 to 15 their first 8 states, lanes 16 to 31 the others.
constexpr int kOwn = kN / 2, kBackwardThreads = 2 * kThreads, kBackwardWarps = kBackwardThreads / 32;

struct BackwardShared {
  Shared s;
  float state[kParts][kOwn / 4][kBackwardThreads][4];  // of each thread before each part
  float dbc[2][kBackwardWarps][kSteps][2 * kN];        // parts take turns
};

/// A lane's way through its chunk, forward and back. kWhole: all tokens and channels of the block exist and no document
/// starts. Otherwise channels that do not exist compute on the last one's numbers (the sums over a warp need every
/// lane) and count for 0.
template <bool kWhole>
struct Walk {
  const Args& a;
  BackwardShared& s;
  const Place w;
  Place own;
  int half, n0;  // which half of the channel's states is the lane's, and the first of them
  Channel<kOwn> channel;
  float d, dh[kOwn], da[kOwn] = {}, dd = 0;

  __device__ __forceinline__ Walk(const Args& args, BackwardShared& shared, const Place& place)
      : a(args),
        s(shared),
        w(place),
        own(place),
        half(threadIdx.x / 16 % 2),
        n0(half * kOwn),
        channel(args, min(place.i, args.p.channels - 1), n0) {
    if (!w.exists) own.i = a.p.channels - 1, own.index -= w.i - own.i;
    d = half ? 0.f : a.p.d[own.i];
  }
  __device__ __forceinline__ bool has(int t) const { return kWhole || t < w.count; }
  __device__ __forceinline__ bool counts(int t) const { return kWhole || (w.exists && t < w.count); }
  __device__ __forceinline__ bool starts(int t) const { return !kWhole && s.s.starts[t]; }

  /// The inputs of a part's tokens.
  struct Inputs {
    float x[kSteps], dt[kSteps];
  };
  __device__ __forceinline__ void load(Inputs& in, int part) const {
    const int t0 = part * kSteps;
    const auto* x = a.p.x + w.b * a.p.x_batch + (w.t0 + t0) * a.p.x_time + own.i;
    const float* dt = a.p.dt + own.packed(a, t0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i, x += a.p.x_time, dt += a.p.channels) {
      in.x[i] = counts(t0 + i) ? __bfloat162float(*x) : 0.f;
      in.dt[i] = has(t0 + i) ? *dt : 0.f;
    }
  }
  __device__ __forceinline__ void step(float (&h)[kOwn], const Inputs& in, int part, int i) const {
    float b[kOwn];
    read_states(b, s.s.b[part * kSteps + i] + n0);
    channel.step(h, in.dt[i], in.x[i], b, starts(part * kSteps + i));
  }
  __device__ __forceinline__ void read_before(float (&h)[kOwn], int part) const {
#pragma unroll
    for (int n = 0; n < kOwn; n += 4) {
      const float4 v = *reinterpret_cast<const float4*>(s.state[part][n / 4][threadIdx.x]);
      h[n] = v.x, h[n + 1] = v.y, h[n + 2] = v.z, h[n + 3] = v.w;
    }
  }

  /// Leaves the state before each part.
  __device__ __forceinline__ void forward() {
    float h[kOwn];
    read_states(h, a.before + own.index * kN + n0);
    Inputs next;
    load(next, 0);
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      const Inputs in = next;
      load(next, min(part + 1, kParts - 1));
#pragma unroll
      for (int n = 0; n < kOwn; n += 4) {
        *reinterpret_cast<float4*>(s.state[part][n / 4][threadIdx.x]) = make_float4(h[n], h[n + 1], h[n + 2], h[n + 3]);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) step(h, in, part, i);
    }
  }

  __device__ __forceinline__ void backward_part(int part) {
    Inputs in;
    load(in, part);
    float h[kOwn], states[kSteps][kOwn];
    read_before(h, part);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      step(h, in, part, i);
#pragma unroll
      for (int n = 0; n < kOwn; ++n) states[i][n] = h[n];
    }
#pragma unroll
    for (int i = kSteps - 1; i >= 0; --i) {
      if (i == 0) read_before(h, part);
      token(part, i, in.dt[i], states[i], i == 0 ? h : states[i - 1]);
    }
  }

  /// Token i of the part: the state after it and the one before.
  __device__ __forceinline__ void token(int part, int i, float dt, const float (&after)[kOwn],
                                        const float (&before)[kOwn]) {
    const int t = part * kSteps + i;
    const int64_t place = own.packed(a, t);
    const float x = counts(t) ? load_x(a, own, t) : 0.f, dy = counts(t) ? __bfloat162float(a.g.dy[place]) : 0.f;
    float b[kOwn], c[kOwn], sums[2 * kOwn], through_b = 0, through_decay = 0;
    read_states(b, s.s.b[t] + n0), read_states(c, s.s.c[t] + n0);
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      dh[n] = fmaf(c[n], dy, dh[n]);
      sums[n] = dt * x * dh[n];
      sums[kOwn + n] = dy * after[n];
      through_b = fmaf(dh[n], b[n], through_b);
      dh[n] *= channel.decay(dt, n, starts(t));
      const float flow = dh[n] * before[n];  // through the logarithm of the decay
      through_decay = fmaf(channel.a[n], flow, through_decay);
      da[n] = fmaf(dt, flow, da[n]);
    }
    dd = fmaf(x, dy, dd);
    // The first half ends with dx, the second with ddt.
    const float dx = fmaf(dt, through_b, d * dy), ddt = fmaf(x, through_b, through_decay / kLog2E);
    const float total = (half ? ddt : dx) + __shfl_xor_sync(0xffffffffu, half ? dx : ddt, 16);
    if (counts(t) && half) a.g.ddt[place] = total;
    if (counts(t) && !half) a.g.dx[place] = __float2bfloat16(total);
    // Lane l has the sum of its half's l-th: db of 8 states, then dc.
    s.dbc[part % 2][threadIdx.x / 32][i][threadIdx.x / 8 % 2 * kN + n0 + threadIdx.x % 8] = transposing_sum(sums);
  }

  /// The sums over a part's tokens that all channels of the block have in common.
  __device__ __forceinline__ void store_dbc(int part) const {
    const int i = threadIdx.x / 32, slot = threadIdx.x % 32, t = part * kSteps + i;
    if (!has(t)) return;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kBackwardWarps; ++warp) sum += s.dbc[part % 2][warp][i][slot];
    a.g.dbc[((blockIdx.x * a.p.batch + w.b) * a.p.length + w.t0 + t) * 32 + slot] = sum;
  }

  __device__ __forceinline__ void run() {
    forward();
    read_states(dh, a.behind + own.index * kN + n0);
#pragma unroll 1
    for (int part = kParts - 1; part >= 0; --part) {
      backward_part(part);
      __syncthreads();
      store_dbc(part);
    }
    if (!w.exists) return;
    write_states(a.g.da + own.index * kN + n0, da);
    if (!half) a.g.dd[own.index] = dd;
  }
};

__global__ void __launch_bounds__(kBackwardThreads, 2) backward_kernel(const __grid_constant__ Args a) {
  static_assert(kBackwardThreads == kSteps * 2 * kN);
  extern __shared__ __align__(16) char smem[];
  auto& s = *reinterpret_cast<BackwardShared*>(smem);
  const Place w(a, threadIdx.x / 32 * 16 + threadIdx.x % 16);
  s.s.load(a, w);
  const bool whole = !a.p.starts && w.count == kTokens && (blockIdx.x + 1) * int64_t(kThreads) <= a.p.channels;
  whole ? Walk<true>(a, s, w).run() : Walk<false>(a, s, w).run();
}

// ------------------------------------------------------------------------------------------------------------ host
Args make_args(const MambaParams& p, void* workspace) {
  Args a{};
  a.p = p;
  a.chunks = mamba_chunks(p);
  const int64_t n = p.batch * a.chunks * p.channels;
  a.before = static_cast<float*>(workspace);
  a.behind = a.before + n * kN;
  a.time = a.behind + n * kN;
  return a;
}

dim3 grid_of_chunks(const Args& a) {
  return {static_cast<unsigned>((a.p.channels + kThreads - 1) / kThreads), static_cast<unsigned>(a.chunks),
          static_cast<unsigned>(a.p.batch)};
}

template <bool kBackwards>
cudaError_t link(const Args& a, const float* first, float* last, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((a.p.channels * kN + kThreads - 1) / kThreads),
                  static_cast<unsigned>(a.p.batch));
  link_kernel<kBackwards><<<grid, kThreads, 0, stream>>>(a, first, last);
  return cudaGetLastError();
}

}  // namespace

bool mamba_supported(int64_t states) { return states == kN; }

int64_t mamba_workspace(const MambaParams& p) { return p.batch * mamba_chunks(p) * p.channels * (2 * kN + 1) * 4; }

cudaError_t mamba_forward(const MambaParams& p, __nv_bfloat16* y, float* last, void* workspace, cudaStream_t stream) {
  Args a = make_args(p, workspace);
  a.y = y;
  summary_kernel<<<grid_of_chunks(a), kThreads, 0, stream>>>(a);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = link<false>(a, p.first, last, stream);
  if (error != cudaSuccess) return error;
  output_kernel<<<grid_of_chunks(a), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

cudaError_t mamba_backward(const MambaParams& p, const MambaGradients& g, void* workspace, cudaStream_t stream) {
  Args a = make_args(p, workspace);
  a.g = g;
  summary_kernel<<<grid_of_chunks(a), kThreads, 0, stream>>>(a);
  cudaError_t error = cudaGetLastError();
  // The last state goes where the first one's gradient will be written.
  if (error == cudaSuccess) error = link<false>(a, p.first, g.dfirst, stream);
  if (error != cudaSuccess) return error;
  summary_backward_kernel<<<grid_of_chunks(a), kThreads, 0, stream>>>(a);
  error = cudaGetLastError();
  if (error == cudaSuccess) error = link<true>(a, g.dlast, g.dfirst, stream);
  constexpr int kSmem = sizeof(BackwardShared);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (error != cudaSuccess) return error;
  backward_kernel<<<grid_of_chunks(a), kBackwardThreads, kSmem, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace fox::cuda
