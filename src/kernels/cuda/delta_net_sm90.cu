// DeltaNet in chunks of 64 tokens by the WY form (arXiv 2406.06484). Token i writes w_i = beta_i (v_i - Sᵀk_i -
// Σ_{j<i} (k_i·k_j) w_j), S the state before the chunk. With L_ij = beta_i k_i·k_j (j < i) and T = (1 + L)^-1:
//   prepare   W = T (beta k), U = T (beta v), for all chunks at once; T by forward substitution in float32
//   scan      N = U - W S (what is written), S += kᵀ N: the one part that is a chain of matrix products
//   output    o = (q S + tril(q kᵀ) N) / √D, for all chunks at once
//   backward  dN from the outputs for all chunks; the scan in reverse, dN += k dS, dS += qᵀ do / √D - Wᵀ dN; the rest
//             for all chunks at once: dW = -dN Sᵀ, d(beta k) = Tᵀ dW, d(beta v) = Tᵀ dN,
//             dL = -(d(beta k) Wᵀ + d(beta v) Uᵀ) below the diagonal.
// The scan is in delta_net_scan.cuh. States are stored transposed, (value, key).

#include <utility>

#include "kernels/cuda/delta_net_scan.cuh"
#include "kernels/cuda/forgetting_attn_prefix.h"
#include "kernels/cuda/launch.h"

namespace fox::cuda {
namespace {

using namespace delta_net;

// --------------------------------------------------------------------------------------------------------- prepare
template <int kD>
constexpr int kPrepareSmem = 2 * Tile<kD>::kBytes + Tile<64>::kBytes;

// 4 warps of 16 tokens each. Registers are what bounds the blocks of a processor.
template <int kD>
__global__ void __launch_bounds__(128, kD == 128 ? 3 : 4) prepare_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ __align__(16) float lower[kChunk][kChunk];
  __shared__ float beta[kChunk];
  const Tile<kD> k{ptx::smem_u32(smem)}, v{k.base + Tile<kD>::kBytes};
  const Tile<64> inverse{v.base + Tile<kD>::kBytes};
  const Place<kD> place(a, blockIdx.y, blockIdx.x);
  const int warp = threadIdx.x / 32, r = lane_id() / 4, q = lane_id() % 4;
  place.template load<128>(k, a.p.k);
  place.template load<128>(v, a.p.v);
  copy_commit();
  if (threadIdx.x < kChunk) beta[threadIdx.x] = place.beta(a, threadIdx.x);
  const Documents documents = place.documents(a);
  if (threadIdx.x == 0) a.passes[place.index] = documents.starts == 0;
  copy_wait<0>();
  __syncthreads();
  store_image<128>(k, a.k + place.tile(), [&](int row) { return documents.leaves(row) ? 1.f : 0.f; });
  float products[8][4];
  clear(products);
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t f[4];
    a_rows(f, k, 16 * warp, c);
    mma_rows(products, f, k, 0, c);
  }
  documents.masked([&](auto sees) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = 16 * warp + r + e / 2 * 8, j = 8 * n + 2 * q + e % 2;
        lower[i][j] = j < i && sees(i, j) ? beta[i] * products[n][e] : 0.f;
      }
  });
  __syncthreads();
  if (threadIdx.x < kChunk) {
    // A thread solves for one column of T: rows of `lower` are the same for all, so they are read by broadcast.
    const int column = threadIdx.x;
    float t[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      float sum[4] = {i == column ? 1.f : 0.f, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 l = *reinterpret_cast<const float4*>(&lower[i][j]);
        sum[0] -= l.x * t[j];
        if (j + 1 < i) sum[1] -= l.y * t[j + 1];
        if (j + 2 < i) sum[2] -= l.z * t[j + 2];
        if (j + 3 < i) sum[3] -= l.w * t[j + 3];
      }
      t[i] = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    }
    if (a.inverse) {
      bf16* to = a.inverse + place.index * kChunk * kChunk + column;
#pragma unroll
      for (int i = 0; i < kChunk; ++i) to[i * kChunk] = __float2bfloat16(t[i]);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      const bf16 value = __float2bfloat16(t[i] * beta[column]);
      asm volatile("st.shared.b16 [%0], %1;" ::"r"(inverse.at(i, column / 8) + column % 8 * 2),
                   "h"(*reinterpret_cast<const uint16_t*>(&value))
                   : "memory");
    }
  }
  __syncthreads();
  float w[kD / 8][4], u[kD / 8][4];
  clear(w);
  for (int j = 0; j <= warp; ++j) {
    uint32_t f[4];
    a_rows(f, inverse, 16 * warp, 16 * j);
    mma_columns(w, f, k, 16 * j, 0);
  }
  documents.keep_entering(w, 16 * warp + r);
  clear(u);
  for (int j = 0; j <= warp; ++j) {
    uint32_t f[4];
    a_rows(f, inverse, 16 * warp, 16 * j);
    mma_columns(u, f, v, 16 * j, 0);
  }
  __syncthreads();
  put_image(k, 16 * warp, 0, w, a.w + place.tile());
  put_image(v, 16 * warp, 0, u, a.u + place.tile());
}

// ------------------------------------------------------------------------------------------------- parallel kernels
constexpr int kThreads = 256;  // 8 warps: 4 blocks of 16 tokens × 2 halves of the columns

template <int kD>
constexpr int kStateBytes = kD* kD * 2;

template <int kD>
__device__ __forceinline__ void load_state(Tile<kD> to, const bf16* from) {
  load_image<kThreads, kD>(to, from);
}

/// x kᵀ · scale for j <= i of one document, by blocks of 16 tokens whose second index has the parity of this warp's
/// half.
template <int kD>
__device__ __forceinline__ void put_products(Tile<64> to, Tile<kD> x, Tile<kD> y, int rb, int half, float scale,
                                             Documents documents) {
  const int r = lane_id() / 4, q = lane_id() % 4;
  for (int jb = half; jb <= rb; jb += 2) {
    float d[2][4];
    clear(d);
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t f[4];
      a_rows(f, x, 16 * rb, c);
      mma_rows(d, f, y, 16 * jb, c);
    }
    documents.masked([&](auto sees) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = r + i % 4 / 2 * 8, column = 8 * (i / 4) + 2 * q + i % 2;
        const bool kept = (jb < rb || column <= row) && sees(16 * rb + row, 16 * jb + column);
        d[i / 4][i % 4] = kept ? scale * d[i / 4][i % 4] : 0.f;
      }
    });
    put(to, 16 * rb, 16 * jb, d);
  }
}

/// This warp's rows and half of the columns of a tile, as accumulators.
template <int kTiles, int kD>
__device__ __forceinline__ void get(float (&d)[kTiles][4], Tile<kD> x, int m, int n) {
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    uint32_t f[4];
    a_rows(f, x, m, n + 8 * i);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d[i + e / 2][e % 2 * 2] = low_of(f[e]);
      d[i + e / 2][e % 2 * 2 + 1] = high_of(f[e]);
    }
  }
  __syncwarp();  // what was read may be overwritten now
}

/// N = U - W S in place of U: a warp reads and writes only its own part of U.
template <int kD>
__device__ __forceinline__ void make_written(Tile<kD> to, Tile<kD> u, Tile<kD> w, Tile<kD> state, int rb, int half) {
  float n[kD / 16][4];
  get(n, u, 16 * rb, kD / 2 * half);
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t f[4];
    a_rows(f, w, 16 * rb, c);
#pragma unroll
    for (int e = 0; e < 4; ++e) f[e] = negated(f[e]);
    mma_rows(n, f, state, kD / 2 * half, c);
  }
  put(to, 16 * rb, kD / 2 * half, n);
}

template <int kD>
struct OutputSmem {
  static constexpr int kQ = 0, kK = kQ + Tile<kD>::kBytes, kW = kK + Tile<kD>::kBytes, kU = kW + Tile<kD>::kBytes,
                       kState = kU + Tile<kD>::kBytes, kA = kState + kStateBytes<kD>, kBytes = kA + Tile<64>::kBytes;
};

template <int kD>
__global__ void __launch_bounds__(kThreads, 2) output_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  using S = OutputSmem<kD>;
  const uint32_t base = ptx::smem_u32(smem);
  const Tile<kD> q{base + S::kQ}, k{base + S::kK}, w{base + S::kW}, u{base + S::kU}, state{base + S::kState};
  const Tile<64> weights{base + S::kA};
  const Place<kD> place(a, blockIdx.y, blockIdx.x);
  const int rb = threadIdx.x / 32 % 4, half = threadIdx.x / 128;
  place.template load<kThreads>(q, a.p.q);
  place.template load<kThreads>(k, a.p.k);
  load_image<kThreads>(w, a.w + place.tile());
  load_image<kThreads>(u, a.u + place.tile());
  load_state(state, a.before + place.state());
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  const Documents documents = place.documents(a);
  put_products(weights, q, k, rb, half, 1.f, documents);
  make_written(u, u, w, state, rb, half);
  __syncthreads();
  float o[kD / 16][4];
  clear(o);
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t f[4];
    a_rows(f, q, 16 * rb, c);
    mma_rows(o, f, state, kD / 2 * half, c);
  }
  documents.keep_entering(o, 16 * rb + lane_id() / 4);
  for (int jb = 0; jb <= rb; ++jb) {
    uint32_t f[4];
    a_rows(f, weights, 16 * rb, 16 * jb);
    mma_columns(o, f, u, 16 * jb, kD / 2 * half);
  }
#pragma unroll
  for (int n = 0; n < kD / 16; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= kScale<kD>;
  place.store_packed(a.o, w, 16 * rb, kD / 2 * half, o, a.p);
}

template <int kD>
constexpr int kWrittenSmem = 3 * Tile<kD>::kBytes + Tile<64>::kBytes;

// dN = tril(q kᵀ)ᵀ do / √D, the part that does not come through the state.
template <int kD>
__global__ void __launch_bounds__(kThreads, 2) dwritten_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  const Tile<kD> q{ptx::smem_u32(smem)}, k{q.base + Tile<kD>::kBytes}, d_o{k.base + Tile<kD>::kBytes};
  const Tile<64> weights{d_o.base + Tile<kD>::kBytes};
  const Place<kD> place(a, blockIdx.y, blockIdx.x);
  const int rb = threadIdx.x / 32 % 4, half = threadIdx.x / 128;
  place.template load<kThreads>(q, a.p.q);
  place.template load<kThreads>(k, a.p.k);
  place.template load_packed<kThreads>(d_o, a.g.d_o, a.p);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  const Documents documents = place.documents(a);
  put_products(weights, q, k, rb, half, kScale<kD>, documents);
  store_image<kThreads>(q, a.q + place.tile(), [&](int row) { return documents.enters(row) ? kScale<kD> : 0.f; });
  __syncthreads();
  float dn[kD / 16][4];
  clear(dn);
  for (int ib = rb; ib < 4; ++ib) {
    uint32_t f[4];
    a_columns(f, weights, 16 * ib, 16 * rb);
    mma_columns(dn, f, d_o, 16 * ib, kD / 2 * half);
  }
  put_image(q, 16 * rb, kD / 2 * half, dn, a.dn + place.tile());
  // This kernel starts beside the scan (launch_early), whose tensors it does not touch, on the processors that a few
  // sequences leave idle. What is launched behind it waits for it alone, so one of its blocks waits for the scan.
  if (blockIdx.x == gridDim.x - 1 && blockIdx.y == gridDim.y - 1) ptx::wait_for_previous_kernel();
}

template <int kD>
struct BackwardSmem {
  static constexpr int kT = Tile<kD>::kBytes;
  static constexpr int kQ = 0, kK = kT, kDo = 2 * kT, kW = 3 * kT, kU = 4 * kT, kN = 5 * kT, kDn = 6 * kT,
                       kState = 7 * kT, kDstate = kState + kStateBytes<kD>, kInverse = kDstate + kStateBytes<kD>,
                       kDa = kInverse + Tile<64>::kBytes, kDl = kDa + Tile<64>::kBytes, kBytes = kDl + Tile<64>::kBytes;
};

template <int kD>
struct BackwardWarp {
  static constexpr int kTiles = kD / 16;
  using S = BackwardSmem<kD>;
  const Args& a;
  const Place<kD> place;
  const Documents documents;
  const int rb, half, r, q_lane;
  const Tile<kD> q, k, d_o, w, u, n, dn, state, dstate;
  const Tile<64> inverse, da, dl;
  float beta[2];

  __device__ __forceinline__ BackwardWarp(const Args& args, uint32_t base)
      : a(args),
        place(args, blockIdx.y, blockIdx.x),
        documents(place.documents(args)),
        rb(threadIdx.x / 32 % 4),
        half(threadIdx.x / 128),
        r(lane_id() / 4),
        q_lane(lane_id() % 4),
        q{base + S::kQ},
        k{base + S::kK},
        d_o{base + S::kDo},
        w{base + S::kW},
        u{base + S::kU},
        n{base + S::kN},
        dn{base + S::kDn},
        state{base + S::kState},
        dstate{base + S::kDstate},
        inverse{base + S::kInverse},
        da{base + S::kDa},
        dl{base + S::kDl} {
    for (int row = 0; row < 2; ++row) beta[row] = place.beta(a, 16 * rb + r + 8 * row);
  }

  __device__ __forceinline__ void load() const {
    place.template load<kThreads>(q, a.p.q);
    place.template load<kThreads>(k, a.p.k);
    place.template load_packed<kThreads>(d_o, a.g.d_o, a.p);
    load_image<kThreads>(w, a.w + place.tile());
    load_image<kThreads>(u, a.u + place.tile());
    load_image<kThreads>(dn, a.dn + place.tile());
    load_state(state, a.before + place.state());
    load_state(dstate, a.behind + place.state());
    load_rows<kChunk, kThreads>(inverse, a.inverse + place.index * kChunk * kChunk);
    copy_commit();
    copy_wait<0>();
  }

  /// d += x · y with x's rows of this warp, y (D × D) and this warp's half of its columns.
  __device__ __forceinline__ void add_product(float (&d)[kTiles][4], Tile<kD> x, Tile<kD> y, bool negative) const {
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t f[4];
      a_rows(f, x, 16 * rb, c);
#pragma unroll
      for (int e = 0; e < 4; ++e) f[e] = negative ? negated(f[e]) : f[e];
      mma_columns(d, f, y, c, kD / 2 * half);
    }
  }
  /// d += x y with x lower triangular, or with its transpose.
  __device__ __forceinline__ void add_lower(float (&d)[kTiles][4], Tile<64> x, Tile<kD> y) const {
    for (int jb = 0; jb <= rb; ++jb) {
      uint32_t f[4];
      a_rows(f, x, 16 * rb, 16 * jb);
      mma_columns(d, f, y, 16 * jb, kD / 2 * half);
    }
  }
  __device__ __forceinline__ void add_lower_transposed(float (&d)[kTiles][4], Tile<64> x, Tile<kD> y) const {
    for (int ib = rb; ib < 4; ++ib) {
      uint32_t f[4];
      a_columns(f, x, 16 * ib, 16 * rb);
      mma_columns(d, f, y, 16 * ib, kD / 2 * half);
    }
  }
  __device__ __forceinline__ void put_own(Tile<kD> to, const float (&d)[kTiles][4]) const {
    put(to, 16 * rb, kD / 2 * half, d);
  }
  __device__ __forceinline__ void scale_rows(float (&d)[kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) d[i][e] *= beta[e / 2];
  }
  /// Row by row, this half's part of d · x.
  __device__ __forceinline__ void add_dots(float (&dots)[2], const float (&d)[kTiles][4], Tile<kD> x) const {
    float y[kTiles][4];
    get(y, x, 16 * rb, kD / 2 * half);
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) dots[e / 2] += d[i][e] * y[i][e];
  }
  /// The same with the values, which are read from global memory: nothing else needs them.
  __device__ __forceinline__ void add_dots_with_values(float (&dots)[2], const float (&d)[kTiles][4]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int token = 16 * rb + r + 8 * row;
      if (token >= place.valid) continue;
      const bf16* from = place.at(a.p.v) + token * a.p.v.time + kD / 2 * half + 2 * q_lane;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const uint32_t v = __ldg(reinterpret_cast<const uint32_t*>(from + 8 * i));
        dots[row] += d[i][2 * row] * low_of(v) + d[i][2 * row + 1] * high_of(v);
      }
    }
  }
  __device__ __forceinline__ void store(bf16* to, Tile<kD> through, const float (&d)[kTiles][4]) const {
    place.store_packed(to, through, 16 * rb, kD / 2 * half, d, a.p);
  }

  /// dN of the outputs plus what comes through the state behind.
  __device__ __forceinline__ void make_dwritten() const {
    float d[kTiles][4];
    get(d, dn, 16 * rb, kD / 2 * half);
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t f[4];
      a_rows(f, k, 16 * rb, c);
      if (documents.starts) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f[e] = documents.leaves(16 * rb + r + e % 2 * 8) ? f[e] : 0;
      }
      mma_rows(d, f, dstate, kD / 2 * half, c);
    }
    put_own(dn, d);
  }

  /// dL of blocks jb with this half's parity, negative and 0 on and above the diagonal: into dl, and with rows times
  /// beta into da.
  __device__ __forceinline__ void make_dlower() const {
    for (int jb = half; jb <= rb; jb += 2) {
      float d[2][4], times_beta[2][4];
      clear(d);
#pragma unroll
      for (int c = 0; c < kD; c += 16) {
        uint32_t f[4];
        a_rows(f, n, 16 * rb, c);
        mma_rows(d, f, w, 16 * jb, c);
        a_rows(f, dn, 16 * rb, c);
        mma_rows(d, f, u, 16 * jb, c);
      }
      documents.masked([&](auto sees) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int row = r + i % 4 / 2 * 8, column = 8 * (i / 4) + 2 * q_lane + i % 2;
          const bool kept = (jb < rb || column < row) && sees(16 * rb + row, 16 * jb + column);
          d[i / 4][i % 4] = kept ? -d[i / 4][i % 4] : 0.f;
          times_beta[i / 4][i % 4] = beta[i % 4 / 2] * d[i / 4][i % 4];
        }
      });
      put(dl, 16 * rb, 16 * jb, d);
      put(da, 16 * rb, 16 * jb, times_beta);
    }
  }
};

template <int kD>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ float dbeta[2][kChunk];
  const BackwardWarp<kD> x(a, ptx::smem_u32(smem));
  constexpr int kTiles = kD / 16;
  x.load();
  __syncthreads();
  make_written(x.n, x.u, x.w, x.state, x.rb, x.half);
  x.make_dwritten();
  __syncthreads();
  put_products(x.da, x.d_o, x.n, x.rb, x.half, kScale<kD>, x.documents);
  float dq[kTiles][4], dk[kTiles][4], d[kTiles][4], dots[2] = {};
  clear(dq), clear(dk), clear(d);
  x.add_product(dq, x.d_o, x.state, false);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[i][e] *= kScale<kD>;
  x.add_product(dk, x.n, x.dstate, false);
  x.add_product(d, x.dn, x.state, true);  // dW
  const int row = 16 * x.rb + x.r;
  x.documents.keep_entering(dq, row), x.documents.keep_leaving(dk, row), x.documents.keep_entering(d, row);
  __syncthreads();
  x.put_own(x.n, d);
  __syncthreads();
  x.add_lower(dq, x.da, x.k);
  x.add_lower_transposed(dk, x.da, x.q);
  clear(d);
  x.add_lower_transposed(d, x.inverse, x.n);  // d(beta k)
  float dv[kTiles][4];
  clear(dv);
  x.add_lower_transposed(dv, x.inverse, x.dn);  // d(beta v)
  __syncthreads();
  x.put_own(x.n, d);
  x.put_own(x.dn, dv);
  x.add_dots(dots, d, x.k);
  x.add_dots_with_values(dots, dv);
  x.scale_rows(d), x.scale_rows(dv);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[i][e] += d[i][e];
  // q, do and the states are read no more.
  x.store(a.g.dq, x.q, dq);
  x.store(a.g.dv, x.d_o, dv);
  __syncthreads();
  x.make_dlower();
  __syncthreads();
  clear(d);
  x.add_lower(d, x.dl, x.k);
  x.add_dots(dots, d, x.k);
  x.scale_rows(d);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[i][e] += d[i][e];
  x.add_lower_transposed(dk, x.da, x.k);
  x.store(a.g.dk, x.q, dk);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float sum = sum_row(dots[row]);
    if (x.q_lane == 0) dbeta[x.half][16 * x.rb + x.r + 8 * row] = sum;
  }
  __syncthreads();
  if (threadIdx.x < x.place.valid) {
    a.g.dbeta[x.place.packed(a.p, 1) + threadIdx.x * a.p.heads] = dbeta[0][threadIdx.x] + dbeta[1][threadIdx.x];
  }
}

// ------------------------------------------------------------------------------------------------------------ host
template <class Kernel>
cudaError_t launch(Kernel* kernel, const Args& a, dim3 grid, int threads, int smem, cudaStream_t stream,
                   bool early = false) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (error != cudaSuccess) return error;
  if (early) return launch_early(kernel, grid, threads, smem, stream, a);
  kernel<<<grid, threads, smem, stream>>>(a);
  return cudaGetLastError();
}

int64_t sequences_of(const DeltaNetParams& p) { return p.batch * p.heads; }

Args make_args(const DeltaNetParams& p, void* workspace, bool backward) {
  Args a{};
  a.p = p;
  a.chunks = chunks_of(p.length);
  const int64_t chunks = sequences_of(p) * a.chunks, tile = chunks * kChunk * p.dim, states = chunks * p.dim * p.dim;
  auto* free = static_cast<bf16*>(workspace);
  const auto take = [&](int64_t elements) { return std::exchange(free, free + elements); };
  a.w = take(tile), a.u = take(tile), a.k = take(tile), a.before = take(states);
  if (backward) {
    a.behind = take(states), a.dn = take(tile), a.q = take(tile), a.inverse = take(chunks * kChunk * kChunk);
  }
  a.passes = reinterpret_cast<bool*>(free);
  return a;
}

dim3 grid_of_chunks(const Args& a) {
  return dim3(static_cast<unsigned>(a.chunks), static_cast<unsigned>(sequences_of(a.p)));
}

template <int kD, int kColumns, bool kBackwards>
cudaError_t launch_scan(const Args& a, cudaStream_t stream) {
  const dim3 grid(kD / kColumns, static_cast<unsigned>(sequences_of(a.p)));
  return launch(scan_kernel<kD, kColumns, kBackwards>, a, grid, kScanThreads,
                ScanSmem<kD, kColumns, kBackwards>::kBytes, stream);
}

template <int kD, bool kBackwards>
cudaError_t scan(const Args& a, cudaStream_t stream) {
  const bool few = sequences_of(a.p) * kD / 16 <= count_multiprocessors();
  return few ? launch_scan<kD, 16, kBackwards>(a, stream) : launch_scan<kD, 32, kBackwards>(a, stream);
}

template <int kD>
cudaError_t make_states(const Args& a, cudaStream_t stream) {
  const cudaError_t error = launch(prepare_kernel<kD>, a, grid_of_chunks(a), 128, kPrepareSmem<kD>, stream);
  return error == cudaSuccess ? scan<kD, false>(a, stream) : error;
}

template <int kD>
cudaError_t forward(const Args& a, cudaStream_t stream) {
  const cudaError_t error = make_states<kD>(a, stream);
  if (error != cudaSuccess) return error;
  return launch(output_kernel<kD>, a, grid_of_chunks(a), kThreads, OutputSmem<kD>::kBytes, stream);
}

template <int kD>
cudaError_t backward(const Args& a, cudaStream_t stream) {
  const dim3 grid = grid_of_chunks(a);
  cudaError_t error = make_states<kD>(a, stream);
  if (error == cudaSuccess)
    error = launch(dwritten_kernel<kD>, a, grid, kThreads, kWrittenSmem<kD>, stream, /*early=*/true);
  if (error == cudaSuccess) error = scan<kD, true>(a, stream);
  if (error == cudaSuccess) error = launch(backward_kernel<kD>, a, grid, kThreads, BackwardSmem<kD>::kBytes, stream);
  return error;
}

}  // namespace

bool delta_net_supported(int64_t key_dim, int64_t value_dim) {
  return compute_capability() == 90 && key_dim == value_dim && (key_dim == 64 || key_dim == 128);
}

int64_t delta_net_workspace(const DeltaNetParams& p, bool backward) {
  const int64_t chunks = sequences_of(p) * chunks_of(p.length), tile = kChunk * p.dim, state = p.dim * p.dim;
  return chunks * (2 * (backward ? 5 * tile + 2 * state + kChunk * kChunk : 3 * tile + state) + sizeof(bool));
}

cudaError_t delta_net_forward(const DeltaNetParams& p, __nv_bfloat16* o, float* last, void* workspace,
                              cudaStream_t stream) {
  Args a = make_args(p, workspace, false);
  a.o = o, a.last = last;
  return p.dim == 64 ? forward<64>(a, stream) : forward<128>(a, stream);
}

cudaError_t delta_net_backward(const DeltaNetParams& p, const DeltaNetGradients& g, void* workspace,
                               cudaStream_t stream) {
  Args a = make_args(p, workspace, true);
  a.g = g;
  a.last = g.dfirst;  // overwritten by the scan in reverse
  return p.dim == 64 ? backward<64>(a, stream) : backward<128>(a, stream);
}

}  // namespace fox::cuda
