// HGRN2 in chunks of 64 tokens, with a decay for every key channel. Within a chunk o_i = Σ_{j<=i} A_ij v_j,
// A_ij = Σ_c q_ic k_jc exp(l_{j+1,c} + ... + l_{i,c}) / √D. The decay depends on i, j and c, so it has to go into the
// operands: blocks of one token are merged pairwise, and at level k (blocks of 2^k tokens) a query of the second block
// of a pair sees a key of the first through the gates from the second's start to the query and those behind the key to
// the first's end. A token is in the second or in the first block, so at each level there is one matrix
//   E_k[t] = q_t exp(l from its block's start through t)  or  k_t exp(l from t + 1 through its block's end)
// and A is what E_k E_kᵀ has at the level of the highest bit in which i and j differ. Exponents are sums of l <= 0,
// never differences: nothing overflows or cancels, and -inf is an ordinary value.
//
// A thread holds rows r and r + 8 of 16 tokens and 8 neighbouring channels of each 32; lanes r are 3 levels of
// shuffles, the two rows the fourth. It takes 4 channels at a time, and the loops with much in them are not unrolled:
// written out, the backward kernel waited for instructions half of the time. Levels below 16 tokens need no shared
// memory: a row's E is A and B operand of mma alike. Channels stand in the tiles in the order of these fragments
// (`channel`); products over channels do not mind.
//
// The gradient of A comes back the same way: dE_k = M_k E_k with M_k the entries of dA + dAᵀ at level k. The gradient
// of l_t is what flows across t: Σ over queries from t on of E dE, less the same over keys from t on. Both use the
// rounded E, so that what does not cross t cancels to rounding in float32.

#include "kernels/cuda/chunk_place.cuh"
#include "kernels/cuda/chunk_scan.h"
#include "kernels/cuda/hgrn2.h"

namespace fox::cuda {
namespace {

constexpr int kThreads = 256;  // 8 warps: 4 blocks of 16 tokens × 2 halves of the columns

struct Args {
  Hgrn2Params p;
  Hgrn2Gradients g;
  bf16* o;
  float *added, *decay;   // (B, H, chunks, D, D), (B, H, chunks, D)
  bf16 *before, *behind;  // (B, H, chunks, D, D): states, gradients of states
  int64_t chunks;
};

/// The channel that stands at place n of a tile's row.
__device__ __forceinline__ int channel(int n) { return n / 32 * 32 + n % 8 / 2 * 8 + n / 8 % 4 * 2 + n % 2; }

/// Which part of the work a thread has.
template <int kD>
struct Place : ChunkPlace {
  static constexpr int kUnits = kD / 32;  // a half's groups of 32 channels, in two steps of 4 channels a thread
  int rb, half, r, q;
  int64_t sequence;

  __device__ __forceinline__ explicit Place(const Args& a)
      : ChunkPlace(blockIdx.z, blockIdx.y, blockIdx.x, a.p.length) {
    const int warp = threadIdx.x / 32;
    rb = warp % 4, half = warp / 4, r = lane_id() / 4, q = lane_id() % 4;
    sequence = int64_t(b) * a.p.heads + h;
  }
  /// A unit's first place in a tile's row (two n8 tiles), and this thread's first channel.
  __device__ __forceinline__ int column(int unit) const { return kD / 2 * half + 16 * unit; }
  __device__ __forceinline__ int first_channel(int unit) const {
    return kD / 2 * half + unit / 2 * 32 + 8 * q + unit % 2 * 4;
  }
  __device__ __forceinline__ int token(int row) const { return 16 * rb + r + 8 * row; }
  /// Whether this token is in the second block of its pair at a level.
  __device__ __forceinline__ bool second(int level, int row) const {
    return level < 3 ? (r >> level) & 1 : level == 3 ? row : level == 4 ? rb & 1 : rb >> 1;
  }
  __device__ __forceinline__ int64_t state(const Args& a) const { return (sequence * a.chunks + chunk) * kD * kD; }
};

/// A unit's 4 channels of two tokens, 0 behind the end.
struct Pairs {
  uint32_t v[2][2];  // [row][pair of channels]
  template <int kD>
  __device__ __forceinline__ Pairs(const Place<kD>& w, const HeadTensor<bf16>& x, int unit) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint2 raw{};
      if (w.token(row) < w.valid)
        raw = __ldg(reinterpret_cast<const uint2*>(w.at(x) + w.token(row) * x.time + w.first_channel(unit)));
      v[row][0] = raw.x, v[row][1] = raw.y;
    }
  }
};
struct Gates {
  float v[2][4];  // in log2 units
  template <int kD>
  __device__ __forceinline__ Gates(const Place<kD>& w, const HeadTensor<float>& x, int unit) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float4 raw{};
      if (w.token(row) < w.valid)
        raw = __ldg(reinterpret_cast<const float4*>(w.at(x) + w.token(row) * x.time + w.first_channel(unit)));
      v[row][0] = raw.x * kLog2E, v[row][1] = raw.y * kLog2E, v[row][2] = raw.z * kLog2E, v[row][3] = raw.w * kLog2E;
    }
  }
};

/// Sum over the 16 tokens of a block, in all lanes of a channel.
__device__ __forceinline__ float sum_block(float a, float b) {
  float t = a + b;
#pragma unroll
  for (int step = 4; step < 32; step *= 2) t += __shfl_xor_sync(0xffffffffu, t, step);
  return t;
}

/// Totals of each block of 16 tokens and channel.
template <int kD>
using Totals = float[4][kD];

template <int kD>
__device__ __forceinline__ void put_totals(const Args& a, const Place<kD>& w, Totals<kD>& totals) {
#pragma unroll
  for (int unit = 0; unit < Place<kD>::kUnits; ++unit) {
    const Gates l(w, a.p.log_g, unit);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float t = sum_block(l.v[0][e], l.v[1][e]);
      if (w.r == 0) totals[w.rb][w.first_channel(unit) + e] = t;
    }
  }
}

/// Of one channel and two tokens: the exponents of E at each level, and those from the chunk's start and to its end.
struct Exponents {
  float level[6][2], prefix[2], suffix[2];

  template <int kD>
  __device__ __forceinline__ void build(const Place<kD>& w, float a, float b, const Totals<kD>& totals, int c) {
    float p[2] = {a, b}, s[2] = {}, t[2] = {a, b};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const bool second = w.second(k, row);
        level[k][row] = second ? p[row] : s[row];
        const float other = __shfl_xor_sync(0xffffffffu, t[row], 4 << k);
        (second ? p[row] : s[row]) += other;
        t[row] += other;
      }
    }
    level[3][0] = s[0], level[3][1] = p[1];
    s[0] += t[1], p[1] += t[0];
    const float near = totals[w.rb ^ 1][c], far = totals[w.rb & 2 ^ 2][c] + totals[(w.rb & 2 ^ 2) + 1][c];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      level[4][row] = w.second(4, row) ? p[row] : s[row];
      (w.second(4, row) ? p[row] : s[row]) += near;
      level[5][row] = w.second(5, row) ? p[row] : s[row];
      (w.second(5, row) ? p[row] : s[row]) += far;
      prefix[row] = p[row], suffix[row] = s[row];
    }
  }
};

template <int kD>
constexpr float kLogScale = kD == 128 ? -3.5f : -3.f;  // log2(1 / √D), with the queries

/// E at a level, of two channels (exponents x, y) and a row, and the factors that make it.
template <int kD>
struct Entry {
  float low, high;
  uint32_t value;
  __device__ __forceinline__ Entry(const Place<kD>& w, int level, int row, const Exponents& x, const Exponents& y,
                                   uint32_t q, uint32_t k) {
    const bool is_query = w.second(level, row);
    const float extra = is_query ? kLogScale<kD> : 0.f;
    low = ptx::ex2(x.level[level][row] + extra), high = ptx::ex2(y.level[level][row] + extra);
    value = scaled(is_query ? q : k, low, high);
  }
};

/// B operands from a state's rows, which are channels.
template <int kTiles, int kD>
__device__ __forceinline__ void mma_state_columns(float (&d)[kTiles][4], const uint32_t (&a)[4], Tile<kD> x, int k,
                                                  int n) {
  const int row = channel(k + lane_id() / 8 % 2 * 8 + lane_id() % 8);
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    uint32_t b[4];
    load_matrices_transposed(b, x.at(row, n / 8 + i + lane_id() / 16));
    mma(d[i], a, b[0], b[1]);
    mma(d[i + 1], a, b[2], b[3]);
  }
}
template <int kTiles, int kD>
__device__ __forceinline__ void mma_state_rows(float (&d)[kTiles][4], const uint32_t (&a)[4], Tile<kD> x, int n,
                                               int k) {
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    uint32_t b[4];
    const int row = channel(n + 8 * i + lane_id() / 16 * 8 + lane_id() % 8);
    load_matrices(b, x.at(row, k / 8 + lane_id() / 8 % 2));
    mma(d[i], a, b[0], b[1]);
    mma(d[i + 1], a, b[2], b[3]);
  }
}

template <int kD>
constexpr int kStateBytes = kD* kD * 2;

// ---------------------------------------------------------------------------------------------------------- states
// What a chunk adds to the state, Σ_t (k_t exp(suffix)) v_tᵀ, or with kGradient to the state's gradient,
// Σ_t (q_t exp(prefix) / √D) do_tᵀ.
template <int kD, bool kGradient>
__global__ void __launch_bounds__(kThreads) states_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ Totals<kD> totals;
  const Tile<kD> left{ptx::smem_u32(smem)}, right{left.base + Tile<kD>::kBytes};
  const Place<kD> w(a);
  if constexpr (kGradient) {
    w.template load_packed<kThreads>(right, a.g.d_o, a.p);
  } else {
    w.template load<kThreads>(right, a.p.v);
  }
  copy_commit();
  put_totals(a, w, totals);
  __syncthreads();
#pragma unroll
  for (int unit = 0; unit < Place<kD>::kUnits; ++unit) {
    const Gates l(w, a.p.log_g, unit);
    const Pairs x(w, kGradient ? a.p.q : a.p.k, unit);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      Exponents e[2];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        e[j].build(w, l.v[0][2 * p + j], l.v[1][2 * p + j], totals, w.first_channel(unit) + 2 * p + j);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float low = kGradient ? e[0].prefix[row] + kLogScale<kD> : e[0].suffix[row];
        const float high = kGradient ? e[1].prefix[row] + kLogScale<kD> : e[1].suffix[row];
        store_shared(left.at(w.token(row), w.column(unit) / 8 + p) + 4 * w.q,
                     scaled(x.v[row][p], ptx::ex2(low), ptx::ex2(high)));
      }
    }
  }
  if (!kGradient && threadIdx.x < kD) {
    const float total =
        totals[0][threadIdx.x] + totals[1][threadIdx.x] + totals[2][threadIdx.x] + totals[3][threadIdx.x];
    a.decay[(w.sequence * a.chunks + w.chunk) * kD + threadIdx.x] = ptx::ex2(total);
  }
  copy_wait<0>();
  __syncthreads();
  constexpr int kShare = 128 / kD, kTiles = kD / 8 / kShare;  // warps that share 16 rows of the state
  const int warp = threadIdx.x / 32, m = warp / kShare * 16, n = warp % kShare * 8 * kTiles;
  float added[kTiles][4];
  clear(added);
#pragma unroll
  for (int k = 0; k < kChunk; k += 16) {
    uint32_t f[4];
    a_columns(f, left, k, m);
    mma_columns(added, f, right, k, n);
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float* to = a.added + w.state(a) + channel(m + w.r + 8 * row) * kD + n + 2 * w.q;
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      __stcs(reinterpret_cast<float2*>(to + 8 * i), make_float2(added[i][2 * row], added[i][2 * row + 1]));
  }
}

// ------------------------------------------------------------------------------------------------- weights of a chunk
/// A block's own 16×16 of A, from the channels of one half: entries of this lane, columns 2q, + 1 and 8 + 2q, + 1.
struct DiagonalBlock {
  float level[4][2][4], same[2][4];  // E_k E_kᵀ of the levels below 16 tokens; q kᵀ

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int k = 0; k < 4; ++k) clear(level[k]);
    clear(same);
  }
  template <int kD>
  __device__ __forceinline__ void choose(const Place<kD>& w, float (&out)[2][4]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int x = w.r ^ (2 * w.q + e);
      const bool before = 2 * w.q + e < w.r;
#pragma unroll
      for (int row = 0; row < 2; ++row) {  // the 8×8 blocks on the diagonal: row = tile
        const int i = 2 * row + e;
        const float near = x >= 4 ? level[2][row][i] : x >= 2 ? level[1][row][i] : level[0][row][i];
        out[row][i] = x == 0 ? same[row][i] : before ? near : 0.f;
      }
      out[0][2 + e] = level[3][0][2 + e];
      out[1][e] = 0;
    }
  }
};

/// Both passes' first part. A into `weights`, E of levels 4 and 5 into `far`, and, for the state's sake, the queries or
/// (kKeys) keys with all decays of the chunk into `whole`. Begins behind totals and ends before a __syncthreads().
template <int kD, bool kKeys>
__device__ __forceinline__ void make_weights(const Args& a, const Place<kD>& w, const Totals<kD>& totals,
                                             float (&partial)[4][32][8], Tile<kD> (&far)[2], Tile<kD> whole,
                                             Tile<64> weights) {
  DiagonalBlock block;
  block.start();
#pragma unroll 1
  for (int unit = 0; unit < Place<kD>::kUnits; ++unit) {
    const Gates l(w, a.p.log_g, unit);
    const Pairs q(w, a.p.q, unit), k(w, a.p.k, unit);
    uint32_t e[4][4], same[2][4];
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int c = w.first_channel(unit) + 2 * p;
      Exponents x, y;
      x.build(w, l.v[0][2 * p], l.v[1][2 * p], totals, c);
      y.build(w, l.v[0][2 * p + 1], l.v[1][2 * p + 1], totals, c + 1);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const uint32_t qs = q.v[row][p], ks = k.v[row][p];
#pragma unroll
        for (int level = 0; level < 4; ++level) e[level][2 * p + row] = Entry<kD>(w, level, row, x, y, qs, ks).value;
        const float scale = ptx::ex2(kLogScale<kD>);
        same[0][2 * p + row] = scaled(qs, scale, scale), same[1][2 * p + row] = ks;
        const uint32_t piece = w.column(unit) / 8 + p;
#pragma unroll
        for (int level = 4; level < 6; ++level)
          store_shared(far[level - 4].at(w.token(row), piece) + 4 * w.q, Entry<kD>(w, level, row, x, y, qs, ks).value);
        const float low = kKeys ? x.suffix[row] : x.prefix[row] + kLogScale<kD>;
        const float high = kKeys ? y.suffix[row] : y.prefix[row] + kLogScale<kD>;
        store_shared(whole.at(w.token(row), piece) + 4 * w.q, scaled(kKeys ? ks : qs, ptx::ex2(low), ptx::ex2(high)));
      }
    }
#pragma unroll
    for (int level = 0; level < 4; ++level) {
      mma(block.level[level][0], e[level], e[level][0], e[level][2]);
      mma(block.level[level][1], e[level], e[level][1], e[level][3]);
    }
    mma(block.same[0], same[0], same[1][0], same[1][2]);
    mma(block.same[1], same[0], same[1][1], same[1][3]);
  }
  float own[2][4];
  block.choose(w, own);
  if (w.half == 1) {
#pragma unroll
    for (int e = 0; e < 8; ++e) partial[w.rb][lane_id()][e] = own[e / 4][e % 4];
  }
  __syncthreads();
  if (w.half == 0) {
#pragma unroll
    for (int e = 0; e < 8; ++e) own[e / 4][e % 4] += partial[w.rb][lane_id()][e];
    put(weights, 16 * w.rb, 16 * w.rb, own);
  }
  for (int jb = w.half; jb < w.rb; jb += 2) {
    const Tile<kD> x = far[(w.rb ^ jb) >= 2];
    float across[2][4];
    clear(across);
#pragma unroll
    for (int k = 0; k < kD; k += 16) {
      uint32_t f[4];
      a_rows(f, x, 16 * w.rb, k);
      mma_rows(across, f, x, 16 * jb, k);
    }
    put(weights, 16 * w.rb, 16 * jb, across);
  }
}

template <int kD>
struct OutputSmem {
  static constexpr int kV = 0, kState = kV + Tile<kD>::kBytes, kFar = kState + kStateBytes<kD>,
                       kQ = kFar + 2 * Tile<kD>::kBytes, kA = kQ + Tile<kD>::kBytes, kBytes = kA + Tile<64>::kBytes;
};

template <int kD>
__global__ void __launch_bounds__(kThreads, 2) output_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ Totals<kD> totals;
  __shared__ float partial[4][32][8];
  using S = OutputSmem<kD>;
  const uint32_t base = ptx::smem_u32(smem);
  const Tile<kD> v{base + S::kV}, state{base + S::kState}, q{base + S::kQ};
  Tile<kD> far[2] = {{base + S::kFar}, {base + S::kFar + Tile<kD>::kBytes}};
  const Tile<64> weights{base + S::kA};
  const Place<kD> w(a);
  w.template load<kThreads>(v, a.p.v);
  load_rows<kD, kThreads>(state, a.before + w.state(a));
  copy_commit();
  put_totals(a, w, totals);
  __syncthreads();
  make_weights<kD, false>(a, w, totals, partial, far, q, weights);
  copy_wait<0>();
  __syncthreads();
  float o[kD / 16][4];
  clear(o);
  for (int jb = 0; jb <= w.rb; ++jb) {
    uint32_t f[4];
    a_rows(f, weights, 16 * w.rb, 16 * jb);
    mma_columns(o, f, v, 16 * jb, kD / 2 * w.half);
  }
#pragma unroll
  for (int k = 0; k < kD; k += 16) {
    uint32_t f[4];
    a_rows(f, q, 16 * w.rb, k);
    mma_state_columns(o, f, state, k, kD / 2 * w.half);
  }
  w.store_packed(a.o, far[0], 16 * w.rb, kD / 2 * w.half, o, a.p);
}

// -------------------------------------------------------------------------------------------------------- backward
template <int kD>
struct BackwardSmem {
  static constexpr int kV = 0, kDo = kV + Tile<kD>::kBytes, kState = kDo + Tile<kD>::kBytes,
                       kDstate = kState + kStateBytes<kD>, kFar = kDstate + kStateBytes<kD>,
                       kK = kFar + 2 * Tile<kD>::kBytes, kA = kK + Tile<kD>::kBytes, kDa = kA + Tile<64>::kBytes,
                       kBytes = kDa + Tile<64>::kBytes;
};

__device__ __forceinline__ float load_element(Tile<64> x, int row, int column) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(x.at(row, column / 8) + column % 8 * 2) : "memory");
  return __uint_as_float(uint32_t(v) << 16);
}

/// Σ_v state * dstate for each channel, with the chunk's decay: what flows through the chunk.
template <int kD>
__device__ __forceinline__ void put_through_flow(float (&flow)[kD], Tile<kD> state, Tile<kD> dstate,
                                                 const Totals<kD>& totals) {
  constexpr int kShare = kThreads / kD;
  const int c = threadIdx.x / kShare;
  float sum = 0;
#pragma unroll
  for (int i = threadIdx.x % kShare; i < kD / 8; i += kShare) {
    const uint4 x = load_shared_16(state.at(c, i)), y = load_shared_16(dstate.at(c, i));
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += low_of(xs[e]) * low_of(ys[e]) + high_of(xs[e]) * high_of(ys[e]);
  }
#pragma unroll
  for (int step = 1; step < kShare; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % kShare == 0) {
    flow[c] = sum * ptx::ex2(totals[0][c] + totals[1][c] + totals[2][c] + totals[3][c]);
  }
}

/// dA_ij = do_i·v_j, 0 above the diagonal.
template <int kD>
__device__ __forceinline__ void put_dweights(const Place<kD>& w, Tile<kD> d_o, Tile<kD> v, Tile<64> dweights) {
  for (int jb = w.half; jb <= w.rb; jb += 2) {
    float d[2][4];
    clear(d);
#pragma unroll
    for (int k = 0; k < kD; k += 16) {
      uint32_t f[4];
      a_rows(f, d_o, 16 * w.rb, k);
      mma_rows(d, f, v, 16 * jb, k);
    }
    if (jb == w.rb) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (8 * (i / 4) + 2 * w.q + i % 2 > w.r + i % 4 / 2 * 8) d[i / 4][i % 4] = 0;
      }
    }
    put(dweights, 16 * w.rb, 16 * jb, d);
  }
}

/// M of the levels below 16 tokens, as A operands.
struct Mirrored {
  uint32_t level[4][4];
  template <int kD>
  __device__ __forceinline__ void build(const Place<kD>& w, Tile<64> dweights) {
    const auto entry = [&](int i, int j) {
      return i == j ? 0.f : load_element(dweights, 16 * w.rb + max(i, j), 16 * w.rb + min(i, j));
    };
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      const int i = w.r + f % 2 * 8, j = 2 * w.q + f / 2 * 8;
      const float low = entry(i, j), high = entry(i, j + 1);
#pragma unroll
      for (int k = 0; k < 4; ++k)
        level[k][f] = pack((i ^ j) >> k == 1 ? low : 0.f, (i ^ (j + 1)) >> k == 1 ? high : 0.f);
    }
  }
};

/// The gradients of a unit's 4 channels and two tokens, and what flows: `into` the token as a query, less what flows
/// out of it as a key within the chunk; `out` of it into the state.
template <int kD>
struct UnitGradients {
  float dq[2][4], dk[2][4], into[2][4], out[2][4];

  /// From dE of one level, channels 2p and 2p + 1.
  __device__ __forceinline__ void add(const Place<kD>& w, int level, int row, int p, const Entry<kD>& e, float d_low,
                                      float d_high) {
    const bool is_query = w.second(level, row);
    const float sign = is_query ? 1.f : -1.f, low = d_low * e.low, high = d_high * e.high;
    dq[row][2 * p] += is_query ? low : 0.f, dq[row][2 * p + 1] += is_query ? high : 0.f;
    dk[row][2 * p] += is_query ? 0.f : low, dk[row][2 * p + 1] += is_query ? 0.f : high;
    into[row][2 * p] += sign * d_low * low_of(e.value), into[row][2 * p + 1] += sign * d_high * high_of(e.value);
  }
};

template <int kD>
struct BackwardTiles {
  Tile<kD> v, d_o, state, dstate, far[2], k;
  Tile<64> weights, dweights;
};

/// dE of levels 4 and 5, 16 columns from n.
template <int kD>
__device__ __forceinline__ void far_gradients(const Place<kD>& w, const BackwardTiles<kD>& x, int n,
                                              float (&d)[2][2][4]) {
  clear(d[0]), clear(d[1]);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int other = i == 0 ? w.rb ^ 1 : (w.rb & 2 ^ 2) + i - 1;
    uint32_t f[4];
    if (other < w.rb) {
      a_rows(f, x.dweights, 16 * w.rb, 16 * other);
    } else {
      a_columns(f, x.dweights, 16 * other, 16 * w.rb);
    }
    mma_columns(d[i > 0], f, x.far[i > 0], 16 * other, n);
  }
}

/// All of one unit but the sums over tokens.
template <int kD>
__device__ __forceinline__ void unit_gradients(const Args& a, const Place<kD>& w, const BackwardTiles<kD>& x, int unit,
                                               const Totals<kD>& totals, const Mirrored& mirrored,
                                               UnitGradients<kD>& out) {
  const Gates l(w, a.p.log_g, unit);
  const Pairs q(w, a.p.q, unit), k(w, a.p.k, unit);
  float far[2][2][4], read[2][4], write[2][4];
  far_gradients(w, x, w.column(unit), far);
  clear(read), clear(write);
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t f[4];
    a_rows(f, x.d_o, 16 * w.rb, c);
    mma_state_rows(read, f, x.state, w.column(unit), c);
    a_rows(f, x.v, 16 * w.rb, c);
    mma_state_rows(write, f, x.dstate, w.column(unit), c);
  }
  Exponents ex[2][2];
#pragma unroll
  for (int e = 0; e < 4; ++e) ex[e / 2][e % 2].build(w, l.v[0][e], l.v[1][e], totals, w.first_channel(unit) + e);
  const float scale = ptx::ex2(kLogScale<kD>);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float same = scale * load_element(x.dweights, w.token(row), w.token(row));
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const float qs[2] = {low_of(q.v[row][p]), high_of(q.v[row][p])};
      const float ks[2] = {low_of(k.v[row][p]), high_of(k.v[row][p])};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int e = 2 * p + j;
        const float dq = read[p][2 * row + j] * ptx::ex2(ex[p][j].prefix[row] + kLogScale<kD>);
        const float dk = write[p][2 * row + j] * ptx::ex2(ex[p][j].suffix[row]);
        out.into[row][e] = dq * qs[j], out.out[row][e] = dk * ks[j];
        out.dq[row][e] = dq + same * ks[j], out.dk[row][e] = dk + same * qs[j];
      }
#pragma unroll
      for (int level = 4; level < 6; ++level) {
        const Entry<kD> e(w, level, row, ex[p][0], ex[p][1], q.v[row][p], k.v[row][p]);
        out.add(w, level, row, p, e, far[level - 4][p][2 * row], far[level - 4][p][2 * row + 1]);
      }
    }
  }
#pragma unroll
  for (int level = 0; level < 4; ++level) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const Entry<kD> e0(w, level, 0, ex[p][0], ex[p][1], q.v[0][p], k.v[0][p]);
      const Entry<kD> e1(w, level, 1, ex[p][0], ex[p][1], q.v[1][p], k.v[1][p]);
      float d[4] = {};
      mma(d, mirrored.level[level], transposed(e0.value), transposed(e1.value));
      out.add(w, level, 0, p, e0, d[0], d[1]);
      out.add(w, level, 1, p, e1, d[2], d[3]);
    }
  }
}

/// Sums within a block of 16 tokens: over `into` from the token on, and over `out` before it. Returns both together and
/// leaves the block's totals.
template <int kD>
__device__ __forceinline__ void sums_in_block(const Place<kD>& w, const UnitGradients<kD>& x, int unit,
                                              float (&result)[2][4], Totals<kD>& into, Totals<kD>& out) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    float s[2] = {}, t[2] = {x.into[0][e], x.into[1][e]}, u[2] = {x.out[0][e], x.out[1][e]};
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      const bool second = (w.r >> k) & 1;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float behind = __shfl_xor_sync(0xffffffffu, t[row], 4 << k);
        const float before = __shfl_xor_sync(0xffffffffu, u[row], 4 << k);
        s[row] += second ? before : behind;
        t[row] += behind, u[row] += before;
      }
    }
    result[0][e] = x.into[0][e] + s[0] + t[1];
    result[1][e] = x.into[1][e] + s[1] + u[0];
    if (w.r == 0) {
      into[w.rb][w.first_channel(unit) + e] = t[0] + t[1];
      out[w.rb][w.first_channel(unit) + e] = u[0] + u[1];
    }
  }
}

/// First element of a thread's unit in a contiguous (B, T, H, D).
template <int kD>
__device__ __forceinline__ int64_t unit_place(const Args& a, const Place<kD>& w, int unit, int row) {
  return w.packed(a.p, kD) + w.token(row) * a.p.heads * kD + w.first_channel(unit);
}

__device__ __forceinline__ void store_unit(bf16* to, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(to) = {pack(x[0], x[1]), pack(x[2], x[3])};
}

/// dlog_g holds the sums within blocks of 16 tokens; what is in other blocks, and what flows through the chunk, is
/// added.
template <int kD>
__device__ __forceinline__ void finish_gates(const Args& a, const Place<kD>& w, int unit, const Totals<kD>& into,
                                             const Totals<kD>& out, const float (&through)[kD]) {
  float more[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int c = w.first_channel(unit) + e;
    more[e] = through[c];
#pragma unroll
    for (int block = 0; block < 4; ++block)
      more[e] += block > w.rb ? into[block][c] : block < w.rb ? out[block][c] : 0.f;
  }
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    if (w.token(row) >= w.valid) continue;
    auto* to = reinterpret_cast<float4*>(a.g.dlog_g + unit_place(a, w, unit, row));
    float4 sum = *to;
    sum.x += more[0], sum.y += more[1], sum.z += more[2], sum.w += more[3];
    *to = sum;
  }
}

template <int kD>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ Totals<kD> totals, into, out;
  __shared__ float partial[4][32][8], through[kD];
  using S = BackwardSmem<kD>;
  const uint32_t base = ptx::smem_u32(smem);
  BackwardTiles<kD> x{{base + S::kV},
                      {base + S::kDo},
                      {base + S::kState},
                      {base + S::kDstate},
                      {{base + S::kFar}, {base + S::kFar + Tile<kD>::kBytes}},
                      {base + S::kK},
                      {base + S::kA},
                      {base + S::kDa}};
  const Place<kD> w(a);
  w.template load<kThreads>(x.v, a.p.v);
  w.template load_packed<kThreads>(x.d_o, a.g.d_o, a.p);
  load_rows<kD, kThreads>(x.state, a.before + w.state(a));
  load_rows<kD, kThreads>(x.dstate, a.behind + w.state(a));
  copy_commit();
  put_totals(a, w, totals);
  __syncthreads();
  make_weights<kD, true>(a, w, totals, partial, x.far, x.k, x.weights);
  copy_wait<0>();
  __syncthreads();
  put_dweights(w, x.d_o, x.v, x.dweights);
  put_through_flow(through, x.state, x.dstate, totals);
  __syncthreads();
  Mirrored mirrored;
  mirrored.build(w, x.dweights);
#pragma unroll 1
  for (int unit = 0; unit < Place<kD>::kUnits; ++unit) {
    UnitGradients<kD> d;
    float sums[2][4];
    unit_gradients(a, w, x, unit, totals, mirrored, d);
    sums_in_block(w, d, unit, sums, into, out);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (w.token(row) >= w.valid) continue;
      const int64_t at = unit_place(a, w, unit, row);
      store_unit(a.g.dq + at, d.dq[row]);
      store_unit(a.g.dk + at, d.dk[row]);
      *reinterpret_cast<float4*>(a.g.dlog_g + at) = {sums[row][0], sums[row][1], sums[row][2], sums[row][3]};
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int unit = 0; unit < Place<kD>::kUnits; ++unit) finish_gates(a, w, unit, into, out, through);
  float dv[kD / 16][4];
  clear(dv);
  for (int ib = w.rb; ib < 4; ++ib) {
    uint32_t f[4];
    a_columns(f, x.weights, 16 * ib, 16 * w.rb);
    mma_columns(dv, f, x.d_o, 16 * ib, kD / 2 * w.half);
  }
#pragma unroll
  for (int k = 0; k < kD; k += 16) {
    uint32_t f[4];
    a_rows(f, x.k, 16 * w.rb, k);
    mma_state_columns(dv, f, x.dstate, k, kD / 2 * w.half);
  }
  w.store_packed(a.g.dv, x.far[0], 16 * w.rb, kD / 2 * w.half, dv, a.p);
}

// ------------------------------------------------------------------------------------------------------------ host
template <class Kernel>
cudaError_t launch(Kernel* kernel, const Args& a, int smem, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(a.chunks), static_cast<unsigned>(a.p.heads), static_cast<unsigned>(a.p.batch));
  kernel<<<grid, kThreads, smem, stream>>>(a);
  return cudaGetLastError();
}

int64_t states_size(const Hgrn2Params& p) { return p.batch * p.heads * chunks_of(p.length) * p.dim * p.dim; }

Args make_args(const Hgrn2Params& p, void* workspace) {
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
          .elements = a.p.dim * a.p.dim,
          .decays = a.p.dim,
          .backwards = false};
}

template <int kD>
cudaError_t forward(const Args& a, float* last, cudaStream_t stream) {
  cudaError_t error = launch(states_kernel<kD, false>, a, 2 * Tile<kD>::kBytes, stream);
  if (error == cudaSuccess) error = chunk_scan(scan_of(a, last), stream);
  if (error == cudaSuccess) error = launch(output_kernel<kD>, a, OutputSmem<kD>::kBytes, stream);
  return error;
}

template <int kD>
cudaError_t backward(const Args& a, cudaStream_t stream) {
  // The last state goes where the first one's gradient will be written.
  cudaError_t error = launch(states_kernel<kD, false>, a, 2 * Tile<kD>::kBytes, stream);
  if (error == cudaSuccess) error = chunk_scan(scan_of(a, a.g.dfirst), stream);
  if (error == cudaSuccess) error = launch(states_kernel<kD, true>, a, 2 * Tile<kD>::kBytes, stream);
  ChunkScanParams reversed = scan_of(a, a.g.dfirst);
  reversed.first = a.g.dlast, reversed.seen = a.behind, reversed.backwards = true;
  if (error == cudaSuccess) error = chunk_scan(reversed, stream);
  if (error == cudaSuccess) error = launch(backward_kernel<kD>, a, BackwardSmem<kD>::kBytes, stream);
  return error;
}

}  // namespace

bool hgrn2_supported(int64_t key_dim, int64_t value_dim) {
  return key_dim == value_dim && (key_dim == 64 || key_dim == 128);
}

int64_t hgrn2_workspace(const Hgrn2Params& p) {
  return states_size(p) * 8 + p.batch * p.heads * chunks_of(p.length) * p.dim * 4;
}

cudaError_t hgrn2_forward(const Hgrn2Params& p, __nv_bfloat16* o, float* last, void* workspace, cudaStream_t stream) {
  Args a = make_args(p, workspace);
  a.o = o;
  return p.dim == 64 ? forward<64>(a, last, stream) : forward<128>(a, last, stream);
}

cudaError_t hgrn2_backward(const Hgrn2Params& p, const Hgrn2Gradients& g, void* workspace, cudaStream_t stream) {
  Args a = make_args(p, workspace);
  a.g = g;
  return p.dim == 64 ? backward<64>(a, stream) : backward<128>(a, stream);
}

}  // namespace fox::cuda
