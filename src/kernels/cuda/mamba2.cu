// Mamba-2 in chunks of 64 tokens (arXiv 2405.21060, section 6). With W_ij = (c_i·b_j) exp(l_{j+1} + ... + l_i) dt_j:
//   states      what a chunk adds to the state: Σ_j exp(l_{j+1} + ... + l_64) dt_j x_j b_jᵀ, for all chunks at once
//   chunk_scan  the state before each chunk (elementwise)
//   output      y_i = Σ_{j<=i} W_ij x_j + exp(l_1 + ... + l_i) h c_i + d x_i
//   backward    the same with c, dy in place of b, x gives what each chunk adds to the state's gradient; the rest, from
//               the states before and the gradients behind each chunk, again for all chunks at once.
// Heads share b and c: a block loads them once for eight heads and keeps c·b in registers, and the gradients of b and c
// add up there. Every decay is a sum of its own (struct Decays), never a difference of prefix sums: nothing cancels
// and -inf, a reset, is an ordinary value.

#include "kernels/cuda/chunk_place.cuh"
#include "kernels/cuda/chunk_scan.h"
#include "kernels/cuda/mamba2.h"

namespace fox::cuda {
namespace {

constexpr int kP = kMamba2HeadDim, kGroup = kMamba2HeadGroup;

struct Args {
  Mamba2Params p;
  Mamba2Gradients g;
  __nv_bfloat16* y;
  float *added, *decay;            // (B, H, chunks, P, N), (B, H, chunks)
  __nv_bfloat16 *before, *behind;  // (B, H, chunks, P, N): states, gradients of states
  int64_t chunks;

  /// A chunk's place among those of all heads, and that of its state.
  __device__ __forceinline__ int64_t index(const ChunkPlace& place) const {
    return (int64_t(place.b) * p.heads + place.h) * chunks + place.chunk;
  }
  __device__ __forceinline__ int64_t state_at(const ChunkPlace& place) const {
    return index(place) * kP * p.state_size;
  }
  /// Of the first of a block's heads; and how many they are.
  __device__ __forceinline__ ChunkPlace place() const {
    return ChunkPlace(blockIdx.z, blockIdx.y * kGroup, blockIdx.x, p.length);
  }
  __device__ __forceinline__ int heads_from(const ChunkPlace& place) const {
    return static_cast<int>(min(int64_t(kGroup), p.heads - place.h));
  }
};

/// Sums of a chunk's l (in log2 units). Blocks of one token are merged pairwise; at level k, of blocks of 2^k tokens, a
/// token in the second block of a pair has the sum from that block's start to itself, one in the first block the sum of
/// all behind itself to that block's end. So for i > j, l_{j+1} + ... + l_i = level[k][i] + level[k][j] with k the
/// highest bit in which i and j differ.
struct Decays {
  float level[6][kChunk];
  float prefix[kChunk], suffix[kChunk];  // from the chunk's start through i; from i + 1 through its end
  float dt[kChunk];

  /// By one warp. Returns the sum over the chunk.
  __device__ __forceinline__ float build(const Args& a, const ChunkPlace& place) {
    float p[2], s[2], t[2];
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = lane + 32 * half;
      const bool exists = row < place.valid;
      const int64_t at = place.packed(a.p, 1) + row * a.p.heads;
      p[half] = t[half] = exists ? a.p.log_decay[at] * kLog2E : 0.f;
      s[half] = 0;
      dt[row] = exists ? a.p.dt[at] : 0.f;
    }
#pragma unroll
    for (int k = 0; k < 6; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool second = k < 5 ? (lane >> k) & 1 : half;
        level[k][lane + 32 * half] = second ? p[half] : s[half];
      }
      const float other[2] = {k < 5 ? __shfl_xor_sync(0xffffffffu, t[0], 1 << k & 31) : t[1],
                              k < 5 ? __shfl_xor_sync(0xffffffffu, t[1], 1 << k & 31) : t[0]};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool second = k < 5 ? (lane >> k) & 1 : half;
        (second ? p[half] : s[half]) += other[half];
      }
      t[0] += other[0], t[1] += other[1];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) prefix[lane + 32 * half] = p[half], suffix[lane + 32 * half] = s[half];
    return t[0];
  }

  /// exp(l_{j+1} + ... + l_i) for i = 16 ib + row, j = 16 jb + column; 0 where j > i.
  __device__ __forceinline__ float between(int ib, int row, int jb, int column) const {
    const int i = 16 * ib + row, j = 16 * jb + column;
    if (j >= i) return j == i ? 1.f : 0.f;
    const int k = 31 - __clz(i ^ j);
    return ptx::ex2(level[k][i] + level[k][j]);
  }
};

// What a chunk adds to the state, or with kGradient to the state's gradient: Σ_t scale_t left_t right_tᵀ.
template <int kN, bool kGradient>
__global__ void __launch_bounds__(128) states_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ Decays decays[2];
  __shared__ float scale[2][kChunk];
  const Tile<kN> right{ptx::smem_u32(smem)};
  const auto left = [&](int i) { return Tile<kP>{right.base + Tile<kN>::kBytes + i % 2 * Tile<kP>::kBytes}; };
  const ChunkPlace place = a.place();
  const int heads = a.heads_from(place), warp = threadIdx.x / 32;
  const auto load_left = [&](int i) {
    if constexpr (kGradient) {
      place.head(i).load_packed<128>(left(i), a.g.dy, a.p);
    } else {
      place.head(i).load<128>(left(i), a.p.x);
    }
    copy_commit();
  };
  place.load<128>(right, kGradient ? a.p.c : a.p.b);
  load_left(0);
  const int r = lane_id() / 4, q = lane_id() % 4;
  for (int i = 0; i < heads; ++i) {
    if (warp == i % 4) {
      Decays& own = decays[i % 2];
      const float total = own.build(a, place.head(i));
      __syncwarp();
      for (int row = lane_id(); row < kChunk; row += 32) {
        scale[i % 2][row] = kGradient ? ptx::ex2(own.prefix[row]) : own.dt[row] * ptx::ex2(own.suffix[row]);
      }
      if (!kGradient && lane_id() == 0) a.decay[a.index(place.head(i))] = ptx::ex2(total);
    }
    copy_wait<0>();
    __syncthreads();
    if (i + 1 < heads) load_left(i + 1);
    float added[kN / 8][4];
    clear(added);
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      uint32_t f[4];
      a_columns(f, left(i), k, 16 * warp);
      const float2 low = *reinterpret_cast<const float2*>(&scale[i % 2][k + 2 * q]);
      const float2 high = *reinterpret_cast<const float2*>(&scale[i % 2][k + 8 + 2 * q]);
      f[0] = scaled(f[0], low.x, low.y), f[1] = scaled(f[1], low.x, low.y);
      f[2] = scaled(f[2], high.x, high.y), f[3] = scaled(f[3], high.x, high.y);
      mma_columns(added, f, right, k, 0);
    }
    float* to = a.added + a.state_at(place.head(i));
#pragma unroll
    for (int n = 0; n < kN / 8; ++n) {
      float* at = to + (16 * warp + r) * kN + 8 * n + 2 * q;
      __stcs(reinterpret_cast<float2*>(at), make_float2(added[n][0], added[n][1]));
      __stcs(reinterpret_cast<float2*>(at + 8 * kN), make_float2(added[n][2], added[n][3]));
    }
  }
}

/// Of the head in flight x (or x and dy) and the states that go with them are in two buffers.
template <int kN>
struct OutputSmem {
  static constexpr int kC = 0, kB = kC + Tile<kN>::kBytes, kY = kB + Tile<kN>::kBytes, kBuffer = kY + Tile<kP>::kBytes;
  static constexpr int kX = 0, kState = kX + Tile<kP>::kBytes, kBufferBytes = kState + Tile<kN>::kBytes;
  static constexpr int kBytes = kBuffer + 2 * kBufferBytes;
};

template <int kN>
__global__ void __launch_bounds__(128) output_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ Decays decays[2];
  using S = OutputSmem<kN>;
  const uint32_t base = ptx::smem_u32(smem);
  const Tile<kN> c_tile{base + S::kC}, b_tile{base + S::kB};
  const Tile<kP> y_tile{base + S::kY};
  const auto x_tile = [&](int i) { return Tile<kP>{base + S::kBuffer + i % 2 * S::kBufferBytes + S::kX}; };
  const auto state = [&](int i) { return Tile<kN>{base + S::kBuffer + i % 2 * S::kBufferBytes + S::kState}; };
  const ChunkPlace place = a.place();
  const int heads = a.heads_from(place), warp = threadIdx.x / 32, r = lane_id() / 4, q = lane_id() % 4;
  const auto load_head = [&](int i) {
    place.head(i).load<128>(x_tile(i), a.p.x);
    load_rows<kP, 128>(state(i), a.before + a.state_at(place.head(i)));
    copy_commit();
  };
  place.load<128>(c_tile, a.p.c);
  place.load<128>(b_tile, a.p.b);
  load_head(0);
  float cb[8][4];  // c_i·b_j: rows of this warp, columns up to its own block
  clear(cb);
  for (int i = 0; i < heads; ++i) {
    if (warp == i % 4) decays[i % 2].build(a, place.head(i));
    copy_wait<0>();
    __syncthreads();
    if (i + 1 < heads) load_head(i + 1);
    if (i == 0) {
      for (int k = 0; k < kN; k += 16) {
        uint32_t f[4];
        a_rows(f, c_tile, 16 * warp, k);
        mma_rows(cb, f, b_tile, 0, k);
      }
    }
    const Decays& l = decays[i % 2];
    float y[8][4];
    clear(y);
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      uint32_t f[4];
      a_rows(f, c_tile, 16 * warp, k);
      mma_rows(y, f, state(i), 0, k);
    }
    const float read[2] = {ptx::ex2(l.prefix[16 * warp + r]), ptx::ex2(l.prefix[16 * warp + r + 8])};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) y[n][e] *= read[e / 2];
#pragma unroll
    for (int jb = 0; jb < 4; ++jb) {
      if (jb > warp) continue;
      float w[2][4];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int column = 8 * tile + 2 * q + e % 2;
          w[tile][e] = cb[2 * jb + tile][e] * l.between(warp, r + e / 2 * 8, jb, column) * l.dt[16 * jb + column];
        }
      uint32_t f[4];
      pack_a(f, w[0], w[1]);
      mma_columns(y, f, x_tile(i), 16 * jb, 0);
    }
    const float d = a.p.d[place.h + i];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t x = load_shared(x_tile(i).at(16 * warp + r + 8 * row, n) + 4 * q);
        y[n][2 * row] += d * low_of(x), y[n][2 * row + 1] += d * high_of(x);
      }
    place.head(i).store_packed(a.y, y_tile, 16 * warp, 0, y, a.p);
  }
}

template <int kN>
struct BackwardSmem {
  static constexpr int kC = 0, kB = kC + Tile<kN>::kBytes, kW = kB + Tile<kN>::kBytes, kDx = kW + Tile<kP>::kBytes,
                       kBuffer = kDx + Tile<kP>::kBytes;
  static constexpr int kX = 0, kDy = kX + Tile<kP>::kBytes, kState = kDy + Tile<kP>::kBytes,
                       kDstate = kState + Tile<kN>::kBytes, kBufferBytes = kDstate + Tile<kN>::kBytes;
  static constexpr int kBytes = kBuffer + 2 * kBufferBytes;
};

/// Sums over a head's rows, from several warps, until one warp puts them together.
struct RowSums {
  float read[2][kChunk], later[2][kChunk];   // flows into i from the state, and from tokens j < i (by half)
  float earlier[4][kChunk];                  // flows out of j into tokens i > j (by block of i)
  float write[2][kChunk], value[2][kChunk];  // flows out of j into the state; x_j · d(dt_j x_j)
  float through[8], skip[8];                 // flow from state to state; dy·x (by warp)
};

/// The gradient of l_t is all that flows across it: the sum over sources before and sinks from t on. By one warp.
__device__ __forceinline__ void finish_rows(const Args& a, const RowSums& sums, const Decays& l,
                                            const ChunkPlace& place) {
  float into[2], out[2], value[2];
  const int lane = lane_id();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane + 32 * half;
    into[half] = sums.read[0][row] + sums.read[1][row] + sums.later[0][row] + sums.later[1][row];
    for (int ib = row / 16; ib < 4; ++ib) into[half] -= sums.earlier[ib][row];
    out[half] = sums.write[0][row] + sums.write[1][row];
    value[half] = sums.value[0][row] + sums.value[1][row];
  }
  float through = 0, skip = 0;
  for (int w = 0; w < 8; ++w) through += sums.through[w], skip += sums.skip[w];
  through *= ptx::ex2(l.prefix[kChunk - 1]);
  // Sinks from t on: an inclusive sum from the end; sources before t: an exclusive sum from the start.
  float from_end[2] = {into[0], into[1]}, from_start[2] = {out[0], out[1]};
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float right = __shfl_down_sync(0xffffffffu, from_end[half], step);
      const float left = __shfl_up_sync(0xffffffffu, from_start[half], step);
      if (lane + step < 32) from_end[half] += right;
      if (lane >= step) from_start[half] += left;
    }
  }
  const float second_half = __shfl_sync(0xffffffffu, from_end[1], 0);
  const float first_half = __shfl_sync(0xffffffffu, from_start[0], 31);
  float before[2] = {__shfl_up_sync(0xffffffffu, from_start[0], 1), __shfl_up_sync(0xffffffffu, from_start[1], 1)};
  if (lane == 0) before[0] = before[1] = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane + 32 * half;
    if (row >= place.valid) continue;
    const int64_t at = place.packed(a.p, 1) + row * a.p.heads;
    a.g.dlog_decay[at] = through + from_end[half] + (half ? 0 : second_half) + before[half] + (half ? first_half : 0);
    a.g.ddt[at] = value[half];
  }
  if (lane == 0) a.g.dd[(int64_t(place.b) * a.chunks + place.chunk) * a.p.heads + place.h] = skip;
}

/// One warp of the backward kernel: rows of block rb; of the columns of whatever it computes, half `half`.
template <int kN>
struct BackwardWarp {
  const Args& a;
  const ChunkPlace place;  // of the first head
  const int rb, half, r, q;
  const Tile<kN> c_tile, b_tile;
  const Tile<kP> w_tile, dx_tile;
  float cb[2][2][4], dcb[2][2][4];  // rows rb, column blocks half and half + 2: c_i·b_j and its gradient
  float db[kN / 16][4], dc[kN / 16][4];

  __device__ __forceinline__ void multiply_cb() {
    for (int k = 0; k < kN; k += 16) {
      uint32_t f[4];
      a_rows(f, c_tile, 16 * rb, k);
#pragma unroll
      for (int m = 0; m < 2; ++m) mma_rows(cb[m], f, b_tile, 16 * (half + 2 * m), k);
    }
  }

  /// W's gradient dy_i·x_j; what flows between tokens; cb with decays (without dt) into w_tile.
  __device__ __forceinline__ void weights(const Decays& l, Tile<kP> x, Tile<kP> dy, RowSums& sums) {
    float later[2] = {};
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int jb = half + 2 * m;
      if (jb > rb) continue;
      float dw[2][4];
      clear(dw);
#pragma unroll
      for (int k = 0; k < kP; k += 16) {
        uint32_t f[4];
        a_rows(f, dy, 16 * rb, k);
        mma_rows(dw, f, x, 16 * jb, k);
      }
      float w[2][4], earlier[2][2] = {};
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = r + e / 2 * 8, column = 8 * tile + 2 * q + e % 2;
          const float decay = l.between(rb, row, jb, column), dt = l.dt[16 * jb + column];
          w[tile][e] = cb[m][tile][e] * decay;
          dcb[m][tile][e] += dw[tile][e] * decay * dt;
          const float flow = jb == rb && row == column ? 0.f : dw[tile][e] * w[tile][e] * dt;
          later[e / 2] += flow;
          earlier[tile][e % 2] += flow;
        }
      put(w_tile, 16 * rb, 16 * jb, w);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float sum = earlier[tile][e];
#pragma unroll
          for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
          if (r == 0) sums.earlier[rb][16 * jb + 8 * tile + 2 * q + e] = sum;
        }
    }
    put_rows(sums.later, later);
  }

  __device__ __forceinline__ void put_rows(float (&to)[2][kChunk], const float (&row)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sum_row(row[i]);
      if (q == 0) to[half][16 * rb + r + 8 * i] = sum;
    }
  }

  /// dx, and the gradient of dt through the values: u_j = d(dt_j x_j).
  __device__ __forceinline__ void values(const Decays& l, Tile<kP> x, Tile<kP> dy, Tile<kN> dstate, RowSums& sums,
                                         const ChunkPlace& head) {
    float u[4][4], value[2] = {}, skip = 0;
    clear(u);
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      uint32_t f[4];
      a_rows(f, b_tile, 16 * rb, k);
      mma_rows(u, f, dstate, 32 * half, k);
    }
    const float write[2] = {ptx::ex2(l.suffix[16 * rb + r]), ptx::ex2(l.suffix[16 * rb + r + 8])};
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) u[n][e] *= write[e / 2];
#pragma unroll
    for (int ib = 0; ib < 4; ++ib) {
      if (ib < rb) continue;
      uint32_t f[4];
      a_columns(f, w_tile, 16 * ib, 16 * rb);
      mma_columns(u, f, dy, 16 * ib, 32 * half);
    }
    const float d = a.p.d[head.h];
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int token = 16 * rb + r + 8 * row;
        const uint32_t xs = load_shared(x.at(token, 4 * half + n) + 4 * q);
        const uint32_t dys = load_shared(dy.at(token, 4 * half + n) + 4 * q);
        float &low = u[n][2 * row], &high = u[n][2 * row + 1];
        value[row] += low * low_of(xs) + high * high_of(xs);
        skip += low_of(dys) * low_of(xs) + high_of(dys) * high_of(xs);
        low = l.dt[token] * low + d * low_of(dys);
        high = l.dt[token] * high + d * high_of(dys);
      }
    put_rows(sums.value, value);
    skip = sum_warp(skip);
    if (lane_id() == 0) sums.skip[threadIdx.x / 32] = skip;
    head.store_packed(a.g.dx, dx_tile, 16 * rb, 32 * half, u, a.p);
  }

  /// grad += (scaled rows of left) · state, and how much of it flows: its product with `with`, row by row.
  __device__ __forceinline__ void through_state(float (&grad)[kN / 16][4], const float (&scale)[2], Tile<kP> left,
                                                Tile<kN> state, Tile<kN> with, float (&to)[2][kChunk]) {
    uint32_t f[kP / 16][4];
    float flow[2] = {};
#pragma unroll
    for (int k = 0; k < kP / 16; ++k) {
      a_rows(f[k], left, 16 * rb, 16 * k);
#pragma unroll
      for (int e = 0; e < 4; ++e) f[k][e] = scaled(f[k][e], scale[e % 2], scale[e % 2]);
    }
#pragma unroll
    for (int n = 0; n < kN / 16; n += 2) {
      float part[2][4];
      clear(part);
#pragma unroll
      for (int k = 0; k < kP / 16; ++k) mma_columns(part, f[k], state, 16 * k, kN / 2 * half + 8 * n);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const uint32_t w = load_shared(with.at(16 * rb + r + 8 * row, kN / 16 * half + n + i) + 4 * q);
          flow[row] += part[i][2 * row] * low_of(w) + part[i][2 * row + 1] * high_of(w);
          grad[n + i][2 * row] += part[i][2 * row], grad[n + i][2 * row + 1] += part[i][2 * row + 1];
        }
    }
    put_rows(to, flow);
  }

  /// The parts of db and dc through cb's gradient, all heads' together; then out they go.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (half + 2 * m <= rb) put(w_tile, 16 * rb, 16 * (half + 2 * m), dcb[m]);
    }
    __syncthreads();
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      uint32_t f[4];
      if (block <= rb) {
        a_rows(f, w_tile, 16 * rb, 16 * block);
        mma_columns(dc, f, b_tile, 16 * block, kN / 2 * half);
      }
      if (block >= rb) {
        a_columns(f, w_tile, 16 * block, 16 * rb);
        mma_columns(db, f, c_tile, 16 * block, kN / 2 * half);
      }
    }
    const int64_t at = ((int64_t(blockIdx.y) * a.p.batch + place.b) * a.p.length + place.t0) * kN + kN / 2 * half;
#pragma unroll
    for (int n = 0; n < kN / 16; ++n)
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int token = 16 * rb + r + 8 * row;
        if (token >= place.valid) continue;
        const int64_t to = at + int64_t(token) * kN + 8 * n + 2 * q;
        *reinterpret_cast<float2*>(a.g.db + to) = make_float2(db[n][2 * row], db[n][2 * row + 1]);
        *reinterpret_cast<float2*>(a.g.dc + to) = make_float2(dc[n][2 * row], dc[n][2 * row + 1]);
      }
  }
};

/// Σ state * dstate over this thread's part.
template <int kN>
__device__ __forceinline__ float product_of_states(Tile<kN> state, Tile<kN> dstate) {
  float sum = 0;
#pragma unroll
  for (int i = threadIdx.x; i < kP * kN / 8; i += 256) {
    const uint4 x = load_shared_16(state.at(i / (kN / 8), i % (kN / 8)));
    const uint4 y = load_shared_16(dstate.at(i / (kN / 8), i % (kN / 8)));
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += low_of(xs[e]) * low_of(ys[e]) + high_of(xs[e]) * high_of(ys[e]);
  }
  return sum;
}

template <int kN>
__global__ void __launch_bounds__(256, 1) backward_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ Decays decays[2];
  __shared__ RowSums sums;
  using S = BackwardSmem<kN>;
  const uint32_t base = ptx::smem_u32(smem);
  const auto buffer = [&](int i) { return base + S::kBuffer + i % 2 * S::kBufferBytes; };
  const ChunkPlace place = a.place();
  const int heads = a.heads_from(place), warp = threadIdx.x / 32;
  const auto load_head = [&](int i) {
    const ChunkPlace head = place.head(i);
    head.load<256>(Tile<kP>{buffer(i) + S::kX}, a.p.x);
    head.load_packed<256>(Tile<kP>{buffer(i) + S::kDy}, a.g.dy, a.p);
    load_rows<kP, 256>(Tile<kN>{buffer(i) + S::kState}, a.before + a.state_at(head));
    load_rows<kP, 256>(Tile<kN>{buffer(i) + S::kDstate}, a.behind + a.state_at(head));
    copy_commit();
  };
  BackwardWarp<kN> w{a,
                     place,
                     warp % 4,
                     warp / 4,
                     lane_id() / 4,
                     lane_id() % 4,
                     {base + S::kC},
                     {base + S::kB},
                     {base + S::kW},
                     {base + S::kDx}};
  place.load<256>(w.c_tile, a.p.c);
  place.load<256>(w.b_tile, a.p.b);
  load_head(0);
  clear(w.db), clear(w.dc);
#pragma unroll
  for (int m = 0; m < 2; ++m) clear(w.cb[m]), clear(w.dcb[m]);
  for (int i = 0; i < heads; ++i) {
    if (warp == i % 8) decays[i % 2].build(a, place.head(i));
    copy_wait<0>();
    __syncthreads();
    if (i + 1 < heads) load_head(i + 1);
    if (i == 0) w.multiply_cb();
    const Decays& l = decays[i % 2];
    const Tile<kP> x{buffer(i) + S::kX}, dy{buffer(i) + S::kDy};
    const Tile<kN> state{buffer(i) + S::kState}, dstate{buffer(i) + S::kDstate};
    w.weights(l, x, dy, sums);
    const float through = sum_warp(product_of_states(state, dstate));
    if (lane_id() == 0) sums.through[warp] = through;
    __syncthreads();
    w.values(l, x, dy, dstate, sums, place.head(i));
    float read[2], write[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = 16 * w.rb + w.r + 8 * row;
      read[row] = ptx::ex2(l.prefix[token]);
      write[row] = l.dt[token] * ptx::ex2(l.suffix[token]);
    }
    w.through_state(w.dc, read, dy, state, w.c_tile, sums.read);
    w.through_state(w.db, write, x, dstate, w.b_tile, sums.write);
    __syncthreads();
    if (warp == i % 8) finish_rows(a, sums, l, place.head(i));
  }
  w.finish();
}

// ------------------------------------------------------------------------------------------------------------ host
template <class Kernel>
cudaError_t launch(Kernel* kernel, const Args& a, int threads, int smem, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(a.chunks), static_cast<unsigned>((a.p.heads + kGroup - 1) / kGroup),
                  static_cast<unsigned>(a.p.batch));
  kernel<<<grid, threads, smem, stream>>>(a);
  return cudaGetLastError();
}

int64_t states_size(const Mamba2Params& p) { return p.batch * p.heads * chunks_of(p.length) * kP * p.state_size; }

Args make_args(const Mamba2Params& p, void* workspace) {
  Args a{};
  a.p = p;
  a.chunks = chunks_of(p.length);
  const int64_t n = states_size(p);
  a.added = static_cast<float*>(workspace);
  a.before = reinterpret_cast<bf16*>(a.added + n);
  a.behind = a.before + n;
  a.decay = reinterpret_cast<float*>(a.behind + n);
  return a;
}

ChunkScanParams scan_of(const Args& a, float* last) {
  return {.added = a.added,
          .decay = a.decay,
          .first = a.p.first,
          .seen = a.before,
          .last = last,
          .sequences = a.p.batch * a.p.heads,
          .chunks = a.chunks,
          .elements = kP * a.p.state_size,
          .decays = 1,
          .backwards = false};
}

template <int kN>
constexpr int kStatesSmem = Tile<kN>::kBytes + 2 * Tile<kP>::kBytes;

template <int kN>
cudaError_t forward(const Args& a, float* last, cudaStream_t stream) {
  cudaError_t error = launch(states_kernel<kN, false>, a, 128, kStatesSmem<kN>, stream);
  if (error == cudaSuccess) error = chunk_scan(scan_of(a, last), stream);
  if (error == cudaSuccess) error = launch(output_kernel<kN>, a, 128, OutputSmem<kN>::kBytes, stream);
  return error;
}

template <int kN>
cudaError_t backward(const Args& a, cudaStream_t stream) {
  // The last state goes where the first one's gradient will be written.
  cudaError_t error = launch(states_kernel<kN, false>, a, 128, kStatesSmem<kN>, stream);
  if (error == cudaSuccess) error = chunk_scan(scan_of(a, a.g.dfirst), stream);
  if (error == cudaSuccess) error = launch(states_kernel<kN, true>, a, 128, kStatesSmem<kN>, stream);
  ChunkScanParams reversed = scan_of(a, a.g.dfirst);
  reversed.first = a.g.dlast, reversed.seen = a.behind, reversed.backwards = true;
  if (error == cudaSuccess) error = chunk_scan(reversed, stream);
  if (error == cudaSuccess) error = launch(backward_kernel<kN>, a, 256, BackwardSmem<kN>::kBytes, stream);
  return error;
}

}  // namespace

bool mamba2_supported(int64_t head_dim, int64_t state_size) {
  return head_dim == kP && (state_size == 64 || state_size == 128);
}

int64_t mamba2_workspace(const Mamba2Params& p) {
  return states_size(p) * 8 + p.batch * p.heads * chunks_of(p.length) * 4;
}

cudaError_t mamba2_forward(const Mamba2Params& p, __nv_bfloat16* y, float* last, void* workspace, cudaStream_t stream) {
  Args a = make_args(p, workspace);
  a.y = y;
  return p.state_size == 64 ? forward<64>(a, last, stream) : forward<128>(a, last, stream);
}

cudaError_t mamba2_backward(const Mamba2Params& p, const Mamba2Gradients& g, void* workspace, cudaStream_t stream) {
  Args a = make_args(p, workspace);
  a.g = g;
  return p.state_size == 64 ? backward<64>(a, stream) : backward<128>(a, stream);
}

}  // namespace fox::cuda
