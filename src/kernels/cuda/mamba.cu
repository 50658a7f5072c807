// Mamba's selective scan (arXiv 2312.00752): every channel and state decays by itself, so there is no matrix product to
// be had; exponentials (16 a token and channel and pass) are what it costs. A thread owns a channel, its 16 states in
// registers, and 64 tokens:
//   summary   what a chunk leaves of a state of 0, and the sum of its time steps, for all chunks at once
//   link      the state before each chunk: S_{c+1} = exp(a Σdt) S_c + summary_c (elementwise)
//   output    the chunks again, each from the right state
//   backward  the same in reverse for the gradient behind each chunk; then each chunk forward, leaving its state every
//   8
//             tokens in shared memory, and backward with those 8 tokens' states in registers.

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

  __device__ __forceinline__ explicit Place(const Args& a) {
    i = int64_t(blockIdx.x) * kThreads + threadIdx.x, chunk = blockIdx.y, b = blockIdx.z, t0 = chunk * kTokens;
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
    for (int e = threadIdx.x; e < kTokens * kN; e += kThreads) {
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

__device__ __forceinline__ void read16(float (&to)[kN], const float* from) {
#pragma unroll
  for (int n = 0; n < kN; n += 4) {
    const float4 v = *reinterpret_cast<const float4*>(from + n);
    to[n] = v.x, to[n + 1] = v.y, to[n + 2] = v.z, to[n + 3] = v.w;
  }
}
__device__ __forceinline__ void write16(float* to, const float (&from)[kN]) {
#pragma unroll
  for (int n = 0; n < kN; n += 4)
    *reinterpret_cast<float4*>(to + n) = make_float4(from[n], from[n + 1], from[n + 2], from[n + 3]);
}

/// A channel's decay rates (log2 units), and what a token does to its states.
struct Channel {
  float a[kN];
  __device__ __forceinline__ Channel(const Args& args, int64_t i) {
    read16(a, args.p.a + i * kN);
#pragma unroll
    for (int n = 0; n < kN; ++n) a[n] *= kLog2E;
  }
  __device__ __forceinline__ float decay(float dt, int n, bool starts) const {
    return starts ? 0.f : ptx::ex2(dt * a[n]);
  }
  __device__ __forceinline__ void step(float (&h)[kN], float dt, float x, const float (&b)[kN], bool starts) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) h[n] = fmaf(decay(dt, n, starts), h[n], dt * x * b[n]);
  }
};

__device__ __forceinline__ float load_x(const Args& a, const Place& w, int t) {
  return __bfloat162float(a.p.x[w.b * a.p.x_batch + (w.t0 + t) * a.p.x_time + w.i]);
}

__global__ void __launch_bounds__(kThreads) summary_kernel(const __grid_constant__ Args a) {
  __shared__ __align__(16) Shared s;
  const Place w(a);
  s.load(a, w);
  if (!w.exists) return;
  const Channel channel(a, w.i);
  float h[kN] = {}, time = 0;
#pragma unroll 4
  for (int t = 0; t < w.count; ++t) {
    float b[kN];
    read16(b, s.b[t]);
    const float dt = a.p.dt[w.packed(a, t)];
    channel.step(h, dt, load_x(a, w, t), b, s.starts[t]);
    time = s.starts[t] ? INFINITY : time + dt;
  }
  write16(a.before + w.index * kN, h);
  a.time[w.index] = time;
}

// The gradient of the state before a chunk through its own outputs.
__global__ void __launch_bounds__(kThreads) summary_backward_kernel(const __grid_constant__ Args a) {
  __shared__ __align__(16) Shared s;
  const Place w(a);
  s.load(a, w);
  if (!w.exists) return;
  const Channel channel(a, w.i);
  float dh[kN] = {};
#pragma unroll 4
  for (int t = w.count - 1; t >= 0; --t) {
    float c[kN];
    read16(c, s.c[t]);
    const float dt = a.p.dt[w.packed(a, t)], dy = __bfloat162float(a.g.dy[w.packed(a, t)]);
#pragma unroll
    for (int n = 0; n < kN; ++n) dh[n] = channel.decay(dt, n, s.starts[t]) * fmaf(c[n], dy, dh[n]);
  }
  write16(a.behind + w.index * kN, dh);
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
  const Place w(a);
  s.load(a, w);
  if (!w.exists) return;
  const Channel channel(a, w.i);
  const float d = a.p.d[w.i];
  float h[kN];
  read16(h, a.before + w.index * kN);
#pragma unroll 4
  for (int t = 0; t < w.count; ++t) {
    float b[kN], c[kN];
    read16(b, s.b[t]), read16(c, s.c[t]);
    const float x = load_x(a, w, t);
    channel.step(h, a.p.dt[w.packed(a, t)], x, b, s.starts[t]);
    float y = d * x;
#pragma unroll
    for (int n = 0; n < kN; ++n) y = fmaf(h[n], c[n], y);
    a.y[w.packed(a, t)] = __float2bfloat16(y);
  }
}

/// 32 values in each of 32 lanes → lane l has the sum of value l over the lanes, in 31 shuffles.
__device__ __forceinline__ float transposing_sum(float (&v)[32]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float sent = upper ? v[i] : v[i + half], kept = upper ? v[i + half] : v[i];
      v[i] = kept + __shfl_xor_sync(0xffffffffu, sent, half);
    }
  }
  return v[0];
}

struct BackwardShared {
  Shared s;
  float state[kParts][kN / 4][kThreads][4];  // of each channel before each part
  float dbc[kThreads / 32][kTokens][32];
};

__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(16) char smem[];
  auto& s = *reinterpret_cast<BackwardShared*>(smem);
  const Place w(a);
  s.s.load(a, w);
  // Channels that do not exist compute on the last one's numbers (the sums over a warp need every lane) and count for
  // 0.
  Place own = w;
  if (!w.exists) own.i = a.p.channels - 1, own.index -= w.i - own.i;
  const Channel channel(a, own.i);
  const float d = a.p.d[own.i];
  float h[kN], dh[kN], da[kN] = {}, dd = 0;
  read16(h, a.before + own.index * kN);
  read16(dh, a.behind + own.index * kN);
#pragma unroll 1
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      *reinterpret_cast<float4*>(s.state[part][n / 4][threadIdx.x]) = make_float4(h[n], h[n + 1], h[n + 2], h[n + 3]);
    }
#pragma unroll 1
    for (int t = part * kSteps; t < min(w.count, (part + 1) * kSteps); ++t) {
      float b[kN];
      read16(b, s.s.b[t]);
      channel.step(h, a.p.dt[own.packed(a, t)], load_x(a, own, t), b, s.s.starts[t]);
    }
  }
#pragma unroll 1
  for (int part = kParts - 1; part >= 0; --part) {
    float states[kSteps][kN], x[kSteps], dt[kSteps], dy[kSteps];
#pragma unroll
    for (int n = 0; n < kN; n += 4) {
      const float4 v = *reinterpret_cast<const float4*>(s.state[part][n / 4][threadIdx.x]);
      h[n] = v.x, h[n + 1] = v.y, h[n + 2] = v.z, h[n + 3] = v.w;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int t = part * kSteps + i;
      const bool valid = t < w.count;
      x[i] = valid ? load_x(a, own, t) : 0.f;
      dt[i] = valid ? a.p.dt[own.packed(a, t)] : 0.f;
      dy[i] = valid && w.exists ? __bfloat162float(a.g.dy[own.packed(a, t)]) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int t = part * kSteps + i;
      float b[kN];
      read16(b, s.s.b[t]);
      channel.step(h, dt[i], x[i], b, s.s.starts[t]);
#pragma unroll
      for (int n = 0; n < kN; ++n) states[i][n] = h[n];
    }
#pragma unroll
    for (int i = kSteps - 1; i >= 0; --i) {
      const int t = part * kSteps + i;
      float b[kN], c[kN], sums[32], through_b = 0, through_decay = 0;
      read16(b, s.s.b[t]), read16(c, s.s.c[t]);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        dh[n] = fmaf(c[n], dy[i], dh[n]);
        const float written = dt[i] * x[i] * b[n];
        // What the decay left of the state before; nothing where a document starts.
        const float flow = s.s.starts[t] ? 0.f : (states[i][n] - written) * dh[n];
        through_b = fmaf(dh[n], b[n], through_b);
        through_decay = fmaf(channel.a[n], flow, through_decay);
        da[n] = fmaf(dt[i], flow, da[n]);
        sums[n] = w.exists ? dt[i] * x[i] * dh[n] : 0.f;
        sums[kN + n] = dy[i] * states[i][n];
        dh[n] *= channel.decay(dt[i], n, s.s.starts[t]);
      }
      dd = fmaf(x[i], dy[i], dd);
      if (w.exists && t < w.count) {
        a.g.dx[own.packed(a, t)] = __float2bfloat16(fmaf(dt[i], through_b, d * dy[i]));
        a.g.ddt[own.packed(a, t)] = fmaf(x[i], through_b, through_decay / kLog2E);
      }
      s.dbc[threadIdx.x / 32][t][threadIdx.x % 32] = transposing_sum(sums);
    }
  }
  if (w.exists) {
    write16(a.g.da + own.index * kN, da);
    a.g.dd[own.index] = dd;
  }
  __syncthreads();
  for (int e = threadIdx.x; e < w.count * 32; e += kThreads) {
    float sum = 0;
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += s.dbc[warp][e / 32][e % 32];
    a.g.dbc[((blockIdx.x * a.p.batch + w.b) * a.p.length + w.t0) * 32 + e] = sum;
  }
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
  backward_kernel<<<grid_of_chunks(a), kThreads, kSmem, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace fox::cuda
