// DeltaNet in chunks of 64 tokens by the WY form (arXiv 2406.06484). Token i writes w_i = beta_i (v_i - Sᵀk_i -
// Σ_{j<i} (k_i·k_j) w_j), S the state before the chunk. With L_ij = beta_i k_i·k_j (j < i) and T = (1 + L)^-1:
//   prepare   W = T (beta k), U = T (beta v), for all chunks at once; T by forward substitution in float32
//   scan      N = U - W S (what is written), S += kᵀ N: the one part that is a chain of matrix products
//   output    o = (q S + tril(q kᵀ) N) / √D, for all chunks at once
//   backward  dN from the outputs for all chunks; the scan in reverse, dN += k dS, dS += qᵀ do / √D - Wᵀ dN; the rest
//             for all chunks at once: dW = -dN Sᵀ, d(beta k) = Tᵀ dW, d(beta v) = Tᵀ dN,
//             dL = -(d(beta k) Wᵀ + d(beta v) Uᵀ) below the diagonal.
// In the scans two warps own 16 columns of the state, half of its rows (keys) each, and keep them, transposed, in
// registers: Sᵀ (16 × D) as accumulators is, packed, the A operand of SᵀWᵀ, and what that gives the A operand of Nᵀk.
// Of SᵀWᵀ each warp has the share of its keys; they exchange their sums once a step. States are stored transposed,
// (value, key).

#include "kernels/cuda/chunk_tile.cuh"
#include "kernels/cuda/delta_net.h"

namespace fox::cuda {
namespace {

struct Args {
  DeltaNetParams p;
  DeltaNetGradients g;
  bf16* o;
  float* last;
  // (B, H, chunks, 64, D), as tiles lie in shared memory; inverse (B, H, chunks, 64, 64), or nullptr; states (B, H,
  // chunks, D, D), values first
  bf16 *w, *u, *k, *q, *dn, *inverse, *before, *behind;
  int64_t chunks;
};

/// The chunk that a block works on.
template <int kD>
struct Place {
  int b, h, valid;
  int64_t chunk, t0, index;  // index: of the chunk among all

  __device__ __forceinline__ Place(const Args& a, int64_t sequence, int64_t c) : chunk(c), t0(c * kChunk) {
    b = static_cast<int>(sequence / a.p.heads), h = static_cast<int>(sequence % a.p.heads);
    valid = static_cast<int>(min(int64_t(kChunk), a.p.length - t0));
    index = sequence * a.chunks + c;
  }
  __device__ __forceinline__ const bf16* at(const HeadTensor<bf16>& x) const {
    return x.data + b * x.batch + t0 * x.time + h * x.head;
  }
  __device__ __forceinline__ int64_t packed(const Args& a) const {
    return ((b * a.p.length + t0) * a.p.heads + h) * kD;
  }
  __device__ __forceinline__ int64_t tile() const { return index * kChunk * kD; }
  __device__ __forceinline__ int64_t state() const { return index * kD * kD; }
  __device__ __forceinline__ float beta(const Args& a, int row) const {
    return row < valid ? a.p.beta[(b * a.p.length + t0 + row) * a.p.heads + h] : 0.f;
  }
};

template <int kD>
constexpr float kScale = kD == 128 ? 0.08838834764831845f : 0.125f;

template <int kRows, int kThreads, int kD>
__device__ __forceinline__ void load_packed(Tile<kD> to, const bf16* from) {
  load_tile<kRows, kThreads>(to, from, kD, kRows);
}

/// A tile to or from global memory as it lies in shared memory, swizzled: the scans fetch it by one bulk copy.
template <int kThreads, int kD>
__device__ __forceinline__ void load_image(Tile<kD> to, const bf16* from) {
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kD / 8; i += kThreads) copy_async(to.base + i * 16, from + i * 8, true);
}
template <int kThreads, int kD>
__device__ __forceinline__ void store_image(Tile<kD> x, bf16* to) {
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kD / 8; i += kThreads)
    reinterpret_cast<uint4*>(to)[i] = load_shared_16(x.base + i * 16);
}
/// A warp's accumulators into an image, through its own part of tile x.
template <int kTiles, int kD>
__device__ __forceinline__ void put_image(Tile<kD> x, int m, int n, const float (&d)[kTiles][4], bf16* to) {
  put(x, m, n, d);
  __syncwarp();
#pragma unroll
  for (int i = lane_id(); i < 16 * kTiles; i += 32) {
    const uint32_t at = x.at(m + i / kTiles, n / 8 + i % kTiles);
    reinterpret_cast<uint4*>(to)[(at - x.base) / 16] = load_shared_16(at);
  }
}

// --------------------------------------------------------------------------------------------------------- prepare
template <int kD>
constexpr int kPrepareSmem = 2 * Tile<kD>::kBytes + Tile<64>::kBytes;

// 4 warps of 16 tokens each.
template <int kD>
__global__ void __launch_bounds__(128) prepare_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  __shared__ __align__(16) float lower[kChunk][kChunk];
  __shared__ float beta[kChunk];
  const Tile<kD> k{ptx::smem_u32(smem)}, v{k.base + Tile<kD>::kBytes};
  const Tile<64> inverse{v.base + Tile<kD>::kBytes};
  const Place<kD> place(a, blockIdx.y, blockIdx.x);
  const int warp = threadIdx.x / 32, r = lane_id() / 4, q = lane_id() % 4;
  load_tile<kChunk, 128>(k, place.at(a.p.k), a.p.k.time, place.valid);
  load_tile<kChunk, 128>(v, place.at(a.p.v), a.p.v.time, place.valid);
  copy_commit();
  if (threadIdx.x < kChunk) beta[threadIdx.x] = place.beta(a, threadIdx.x);
  copy_wait<0>();
  __syncthreads();
  store_image<128>(k, a.k + place.tile());
  float products[8][4];
  clear(products);
#pragma unroll
  for (int c = 0; c < kD; c += 16) {
    uint32_t f[4];
    a_rows(f, k, 16 * warp, c);
    mma_rows(products, f, k, 0, c);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * warp + r + e / 2 * 8, j = 8 * n + 2 * q + e % 2;
      lower[i][j] = j < i ? beta[i] * products[n][e] : 0.f;
    }
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

// ------------------------------------------------------------------------------------------------------------ scan
constexpr int kSplit = 2;

/// A thread block's columns of the state. 16 a block spread a few sequences over the whole GPU; 32 share what is
/// loaded.
template <int kColumns>
constexpr int kScanThreads = kColumns / 16 * 32 * kSplit;

/// A tile of kColumns values (16 or 32) of 64 tokens: several rows share a line of 128 bytes.
template <int kColumns>
struct Slice {
  static constexpr int kBytes = kChunk * kColumns * 2, kPieces = kColumns / 8;
  uint32_t base;
  __device__ __forceinline__ uint32_t at(int row, int piece) const {
    return base + row * 16 * kPieces + ((piece ^ (row * kPieces / 8 & (kPieces - 1))) << 4);
  }
  /// From rows in global memory, and from the columns of a tile's image.
  __device__ __forceinline__ void load(const bf16* from, int64_t stride, int valid) const {
#pragma unroll
    for (int i = threadIdx.x; i < kChunk * kPieces; i += kScanThreads<kColumns>) {
      const int row = i / kPieces, piece = i % kPieces;
      copy_async(at(row, piece), from + (row < valid ? row * stride + piece * 8 : 0), row < valid);
    }
  }
  template <int kD>
  __device__ __forceinline__ void load_image(const bf16* from, int first_column) const {
    constexpr Tile<kD> image{0};
#pragma unroll
    for (int i = threadIdx.x; i < kChunk * kPieces; i += kScanThreads<kColumns>) {
      const int row = i / kPieces, piece = i % kPieces;
      copy_async(at(row, piece), from + image.at(row, first_column / 8 + piece) / 2, true);
    }
  }
  /// A operand: transpose of 16 tokens from k, 16 columns from m.
  __device__ __forceinline__ void a_columns(uint32_t (&a)[4], int k, int m) const {
    load_matrices_transposed(a, at(k + lane_id() / 16 * 8 + lane_id() % 8, m / 8 + lane_id() / 8 % 2));
  }
};

/// A warp's part of Sᵀ as accumulators: 16 values from `column`, keys from `key` on.
template <int kD>
struct StateRows {
  float s[kD / kSplit / 8][4];

  /// Where an entry stands in (D, D), keys first.
  __device__ __forceinline__ static int place(int n, int e, int column, int key) {
    return (key + 8 * n + 2 * (lane_id() % 4) + e % 2) * kD + column + lane_id() / 4 + e / 2 * 8;
  }
  __device__ __forceinline__ void read(const float* from, int column, int key) {
#pragma unroll
    for (int n = 0; n < kD / kSplit / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = from ? from[place(n, e, column, key)] : 0.f;
  }
  __device__ __forceinline__ void write(float* to, int column, int key) const {
#pragma unroll
    for (int n = 0; n < kD / kSplit / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) to[place(n, e, column, key)] = s[n][e];
  }
};

template <int kD, int kColumns, bool kBackwards>
struct ScanSmem {
  // Forward: k, W, and a slice of U. Backward: k, W, q, and slices of dN and do.
  static constexpr int kTiles = kBackwards ? 3 : 2, kSlices = kBackwards ? 2 : 1, kStages = kBackwards ? 3 : 4;
  static constexpr int kStageBytes = kTiles * Tile<kD>::kBytes + kSlices * Slice<kColumns>::kBytes;
  static constexpr int kStaging = kStages * kStageBytes;  // the state on its way out
  static constexpr int kSums = kStaging + kColumns * Tile<kD>::kRowBytes;
  static constexpr int kBytes = kSums + kScanThreads<kColumns> * 8 * 16;
};

/// Adds what the other warp of the 16 columns has; `sums`: 8 × 16 bytes a thread of the block.
template <int kThreads>
__device__ __forceinline__ void exchange(float (&n)[8][4], char* sums) {
  auto* own = reinterpret_cast<float4*>(sums) + threadIdx.x;
  const auto* other = reinterpret_cast<const float4*>(sums) + (threadIdx.x ^ 32);
#pragma unroll
  for (int i = 0; i < 8; ++i) own[i * kThreads] = make_float4(n[i][0], n[i][1], n[i][2], n[i][3]);
  ptx::named_barrier_sync(1 + threadIdx.x / 64, 64);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 x = other[i * kThreads];
    n[i][0] += x.x, n[i][1] += x.y, n[i][2] += x.z, n[i][3] += x.w;
  }
}

template <int kD, int kColumns, bool kBackwards>
__global__ void __launch_bounds__(kScanThreads<kColumns>, 1) scan_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  using S = ScanSmem<kD, kColumns, kBackwards>;
  constexpr int kKeys = kD / kSplit;
  const int block = threadIdx.x / 64, split = threadIdx.x / 32 % kSplit, key = split * kKeys;
  const int first_column = blockIdx.x * kColumns, column = first_column + 16 * block;
  const int64_t sequence = blockIdx.y;
  const uint32_t base = ptx::smem_u32(smem);
  const auto tile = [&](int64_t i, int n) {
    return Tile<kD>{base + static_cast<uint32_t>(i % S::kStages) * S::kStageBytes + n * Tile<kD>::kBytes};
  };
  const auto slice = [&](int64_t i, int n) {
    return Slice<kColumns>{tile(i, S::kTiles).base + n * Slice<kColumns>::kBytes};
  };
  const Tile<kD> staging{base + S::kStaging};
  __shared__ uint64_t arrived[S::kStages];
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) ptx::mbarrier_init(&arrived[i], 1);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const auto place = [&](int64_t i) { return Place<kD>(a, sequence, kBackwards ? a.chunks - 1 - i : i); };
  // Whole tiles by the copy engine, slices by the threads.
  const auto load = [&](int64_t i) {
    if (i < a.chunks) {
      const auto at = place(i);
      if (threadIdx.x == 0) {
        uint64_t* bar = &arrived[i % S::kStages];
        ptx::mbarrier_arrive_expect_tx(bar, S::kTiles * Tile<kD>::kBytes);
        const bf16* from[3] = {a.k, a.w, a.q};
#pragma unroll
        for (int n = 0; n < S::kTiles; ++n)
          ptx::bulk_load(smem + (tile(i, n).base - base), from[n] + at.tile(), Tile<kD>::kBytes, bar);
      }
      if constexpr (kBackwards) {
        slice(i, 0).template load_image<kD>(a.dn + at.tile(), first_column);
        slice(i, 1).load(a.g.d_o + at.packed(a) + first_column, a.p.heads * kD, at.valid);
      } else {
        slice(i, 0).template load_image<kD>(a.u + at.tile(), first_column);
      }
    }
    copy_commit();
  };
  StateRows<kD> state;
  const float* from = kBackwards ? a.g.dlast : a.p.first;
  state.read(from ? from + sequence * kD * kD : nullptr, column, key);
  for (int64_t i = 0; i < S::kStages - 1; ++i) load(i);
  for (int64_t i = 0; i < a.chunks; ++i) {
    copy_wait<S::kStages - 2>();
    ptx::mbarrier_wait(&arrived[i % S::kStages], i / S::kStages % 2);
    __syncthreads();
    load(i + S::kStages - 1);
    uint32_t packed[kKeys / 16][4];
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c) pack_a(packed[c], state.s[2 * c], state.s[2 * c + 1]);
    // Nᵀ = Uᵀ - SᵀWᵀ, or dNᵀ += dSᵀkᵀ.
    const Tile<kD> k = tile(i, 0), w = tile(i, 1);
    float n[8][4];
    clear(n);
    if (split == 0) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t f[4];
        slice(i, 0).a_columns(f, 16 * t, 16 * block);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          n[2 * t + e / 2][e % 2 * 2] = low_of(f[e]);
          n[2 * t + e / 2][e % 2 * 2 + 1] = high_of(f[e]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kKeys / 16; ++c) {
      uint32_t f[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) f[e] = kBackwards ? packed[c][e] : negated(packed[c][e]);
      mma_rows(n, f, kBackwards ? k : w, 0, key + 16 * c);
    }
    // dSᵀ += doᵀq / √D does not wait for the other warp.
    if constexpr (kBackwards) {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        uint32_t f[4];
        slice(i, 1).a_columns(f, 16 * t, 16 * block);
#pragma unroll
        for (int e = 0; e < 4; ++e) f[e] = scaled(f[e], kScale<kD>, kScale<kD>);
        mma_columns(state.s, f, tile(i, 2), 16 * t, key);
      }
    }
    exchange<kScanThreads<kColumns>>(n, smem + S::kSums);
    // Sᵀ += Nᵀk, or dSᵀ -= dNᵀW.
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t f[4];
      pack_a(f, n[2 * t], n[2 * t + 1]);
#pragma unroll
      for (int e = 0; e < 4; ++e) f[e] = kBackwards ? negated(f[e]) : f[e];
      mma_columns(state.s, f, kBackwards ? w : k, 16 * t, key);
    }
    // The state before the chunk (behind it, in reverse) goes out while the products run.
    const int row = 16 * block, piece = key / 8;
#pragma unroll
    for (int c = 0; c < kKeys / 8; ++c) {
      store_shared(staging.at(row + lane_id() / 4, piece + c) + 4 * (lane_id() % 4), packed[c / 2][c % 2 * 2]);
      store_shared(staging.at(row + lane_id() / 4 + 8, piece + c) + 4 * (lane_id() % 4), packed[c / 2][c % 2 * 2 + 1]);
    }
    __syncwarp();
    bf16* to = (kBackwards ? a.behind : a.before) + place(i).state() + int64_t(column) * kD + key;
#pragma unroll
    for (int j = lane_id(); j < 2 * kKeys; j += 32) {
      const int line = j / (kKeys / 8), at = j % (kKeys / 8);
      *reinterpret_cast<uint4*>(to + line * kD + at * 8) = load_shared_16(staging.at(row + line, piece + at));
    }
  }
  state.write((kBackwards ? a.g.dfirst : a.last) + sequence * kD * kD, column, key);
}

// ------------------------------------------------------------------------------------------------- parallel kernels
constexpr int kThreads = 256;  // 8 warps: 4 blocks of 16 tokens × 2 halves of the columns

template <int kD>
constexpr int kStateBytes = kD* kD * 2;

template <int kD>
__device__ __forceinline__ void load_state(Tile<kD> to, const bf16* from) {
  load_packed<kD, kThreads>(to, from);
}

/// x kᵀ · scale for j <= i, by blocks of 16 tokens whose second index has the parity of this warp's half.
template <int kD>
__device__ __forceinline__ void put_products(Tile<64> to, Tile<kD> x, Tile<kD> y, int rb, int half, float scale) {
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
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool kept = jb < rb || 8 * (i / 4) + 2 * q + i % 2 <= r + i % 4 / 2 * 8;
      d[i / 4][i % 4] = kept ? scale * d[i / 4][i % 4] : 0.f;
    }
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
  load_tile<kChunk, kThreads>(q, place.at(a.p.q), a.p.q.time, place.valid);
  load_tile<kChunk, kThreads>(k, place.at(a.p.k), a.p.k.time, place.valid);
  load_image<kThreads>(w, a.w + place.tile());
  load_image<kThreads>(u, a.u + place.tile());
  load_state(state, a.before + place.state());
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  put_products(weights, q, k, rb, half, 1.f);
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
  for (int jb = 0; jb <= rb; ++jb) {
    uint32_t f[4];
    a_rows(f, weights, 16 * rb, 16 * jb);
    mma_columns(o, f, u, 16 * jb, kD / 2 * half);
  }
#pragma unroll
  for (int n = 0; n < kD / 16; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) o[n][e] *= kScale<kD>;
  put_through(w, 16 * rb, kD / 2 * half, o, a.o + place.packed(a), a.p.heads * kD, place.valid);
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
  load_tile<kChunk, kThreads>(q, place.at(a.p.q), a.p.q.time, place.valid);
  load_tile<kChunk, kThreads>(k, place.at(a.p.k), a.p.k.time, place.valid);
  load_tile<kChunk, kThreads>(d_o, a.g.d_o + place.packed(a), a.p.heads * kD, place.valid);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  put_products(weights, q, k, rb, half, kScale<kD>);
  store_image<kThreads>(q, a.q + place.tile());
  __syncthreads();
  float dn[kD / 16][4];
  clear(dn);
  for (int ib = rb; ib < 4; ++ib) {
    uint32_t f[4];
    a_columns(f, weights, 16 * ib, 16 * rb);
    mma_columns(dn, f, d_o, 16 * ib, kD / 2 * half);
  }
  put_image(q, 16 * rb, kD / 2 * half, dn, a.dn + place.tile());
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
  const int rb, half, r, q_lane;
  const Tile<kD> q, k, d_o, w, u, n, dn, state, dstate;
  const Tile<64> inverse, da, dl;
  float beta[2];

  __device__ __forceinline__ BackwardWarp(const Args& args, uint32_t base)
      : a(args),
        place(args, blockIdx.y, blockIdx.x),
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
    load_tile<kChunk, kThreads>(q, place.at(a.p.q), a.p.q.time, place.valid);
    load_tile<kChunk, kThreads>(k, place.at(a.p.k), a.p.k.time, place.valid);
    load_tile<kChunk, kThreads>(d_o, a.g.d_o + place.packed(a), a.p.heads * kD, place.valid);
    load_image<kThreads>(w, a.w + place.tile());
    load_image<kThreads>(u, a.u + place.tile());
    load_image<kThreads>(dn, a.dn + place.tile());
    load_state(state, a.before + place.state());
    load_state(dstate, a.behind + place.state());
    load_tile<kChunk, kThreads>(inverse, a.inverse + place.index * kChunk * kChunk, kChunk, kChunk);
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
    put_through(through, 16 * rb, kD / 2 * half, d, to + place.packed(a), a.p.heads * kD, place.valid);
  }

  /// dN of the outputs plus what comes through the state behind.
  __device__ __forceinline__ void make_dwritten() const {
    float d[kTiles][4];
    get(d, dn, 16 * rb, kD / 2 * half);
#pragma unroll
    for (int c = 0; c < kD; c += 16) {
      uint32_t f[4];
      a_rows(f, k, 16 * rb, c);
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
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool kept = jb < rb || 8 * (i / 4) + 2 * q_lane + i % 2 < r + i % 4 / 2 * 8;
        d[i / 4][i % 4] = kept ? -d[i / 4][i % 4] : 0.f;
        times_beta[i / 4][i % 4] = beta[i % 4 / 2] * d[i / 4][i % 4];
      }
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
  put_products(x.da, x.d_o, x.n, x.rb, x.half, kScale<kD>);
  float dq[kTiles][4], dk[kTiles][4], d[kTiles][4], dots[2] = {};
  clear(dq), clear(dk), clear(d);
  x.add_product(dq, x.d_o, x.state, false);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int e = 0; e < 4; ++e) dq[i][e] *= kScale<kD>;
  x.add_product(dk, x.n, x.dstate, false);
  x.add_product(d, x.dn, x.state, true);  // dW
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
    a.g.dbeta[(x.place.b * a.p.length + x.place.t0 + threadIdx.x) * a.p.heads + x.place.h] =
        dbeta[0][threadIdx.x] + dbeta[1][threadIdx.x];
  }
}

// ------------------------------------------------------------------------------------------------------------ host
template <class Kernel>
cudaError_t launch(Kernel* kernel, const Args& a, dim3 grid, int threads, int smem, cudaStream_t stream) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  if (error != cudaSuccess) return error;
  kernel<<<grid, threads, smem, stream>>>(a);
  return cudaGetLastError();
}

int64_t sequences_of(const DeltaNetParams& p) { return p.batch * p.heads; }

Args make_args(const DeltaNetParams& p, void* workspace, bool backward) {
  Args a{};
  a.p = p;
  a.chunks = chunks_of(p.length);
  const int64_t chunks = sequences_of(p) * a.chunks, tile = chunks * kChunk * p.dim, states = chunks * p.dim * p.dim;
  a.w = static_cast<bf16*>(workspace);
  a.u = a.w + tile;
  a.k = a.u + tile;
  a.before = a.k + tile;
  if (!backward) return a;
  a.behind = a.before + states;
  a.dn = a.behind + states;
  a.q = a.dn + tile;
  a.inverse = a.q + tile;
  return a;
}

template <int kD, int kColumns, bool kBackwards>
cudaError_t launch_scan(const Args& a, cudaStream_t stream) {
  const dim3 grid(kD / kColumns, static_cast<unsigned>(sequences_of(a.p)));
  return launch(scan_kernel<kD, kColumns, kBackwards>, a, grid, kScanThreads<kColumns>,
                ScanSmem<kD, kColumns, kBackwards>::kBytes, stream);
}

template <int kD, bool kBackwards>
cudaError_t scan(const Args& a, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const bool few = sequences_of(a.p) * kD / 16 <= processors;
  return few ? launch_scan<kD, 16, kBackwards>(a, stream) : launch_scan<kD, 32, kBackwards>(a, stream);
}

template <int kD>
cudaError_t make_states(const Args& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.chunks), static_cast<unsigned>(sequences_of(a.p)));
  const cudaError_t error = launch(prepare_kernel<kD>, a, grid, 128, kPrepareSmem<kD>, stream);
  return error == cudaSuccess ? scan<kD, false>(a, stream) : error;
}

template <int kD>
cudaError_t forward(const Args& a, cudaStream_t stream) {
  cudaError_t error = make_states<kD>(a, stream);
  const dim3 grid(static_cast<unsigned>(a.chunks), static_cast<unsigned>(sequences_of(a.p)));
  if (error == cudaSuccess) error = launch(output_kernel<kD>, a, grid, kThreads, OutputSmem<kD>::kBytes, stream);
  return error;
}

template <int kD>
cudaError_t backward(const Args& a, cudaStream_t stream) {
  cudaError_t error = make_states<kD>(a, stream);
  const dim3 grid(static_cast<unsigned>(a.chunks), static_cast<unsigned>(sequences_of(a.p)));
  if (error == cudaSuccess) error = launch(dwritten_kernel<kD>, a, grid, kThreads, kWrittenSmem<kD>, stream);
  if (error == cudaSuccess) error = scan<kD, true>(a, stream);
  if (error == cudaSuccess) error = launch(backward_kernel<kD>, a, grid, kThreads, BackwardSmem<kD>::kBytes, stream);
  return error;
}

}  // namespace

bool delta_net_supported(int64_t key_dim, int64_t value_dim) {
  return key_dim == value_dim && (key_dim == 64 || key_dim == 128);
}

int64_t delta_net_workspace(const DeltaNetParams& p, bool backward) {
  const int64_t chunks = sequences_of(p) * chunks_of(p.length), tile = kChunk * p.dim, state = p.dim * p.dim;
  return chunks * 2 * (backward ? 5 * tile + 2 * state + kChunk * kChunk : 3 * tile + state);
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
