#pragma once

// DeltaNet's chain of states (see delta_net_sm90.cu). Four warps own 16 or 32 columns of the state, transposed, as
// accumulators: a quarter of its keys each. Of Nᵀ each makes 16 tokens. What the others need of both goes through
// shared memory in bf16, as operands are rounded anyway: two barriers a chunk. What is not of the chain is fetched by a
// fifth warp, and is in registers before the chain needs it.

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/delta_net_chunk.cuh"

namespace fox::cuda::delta_net {

/// Warps that share a block's columns, and quarters of a chunk's tokens.
constexpr int kSplit = 4;
constexpr int kChainThreads = 32 * kSplit, kScanThreads = kChainThreads + 32;

/// A tile of kColumns values (16 or 32) of 64 tokens: several rows share a line of 128 bytes.
template <int kColumns>
struct Slice {
  static constexpr int kBytes = kChunk * kColumns * 2, kPieces = kColumns / 8;
  uint32_t base;
  __device__ __forceinline__ uint32_t at(int row, int piece) const {
    return base + row * 16 * kPieces + ((piece ^ (row * kPieces / 8 & (kPieces - 1))) << 4);
  }
  /// By one warp, from rows in global memory and from the columns of a tile's image.
  __device__ __forceinline__ void load(const bf16* from, int64_t stride, int valid) const {
#pragma unroll
    for (int i = lane_id(); i < kChunk * kPieces; i += 32) {
      const int row = i / kPieces, piece = i % kPieces;
      copy_async(at(row, piece), from + (row < valid ? row * stride + piece * 8 : 0), row < valid);
    }
  }
  template <int kD>
  __device__ __forceinline__ void load_image(const bf16* from, int first_column) const {
    constexpr Tile<kD> image{0};
#pragma unroll
    for (int i = lane_id(); i < kChunk * kPieces; i += 32) {
      const int row = i / kPieces, piece = i % kPieces;
      copy_async(at(row, piece), from + image.at(row, first_column / 8 + piece) / 2, true);
    }
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
  static constexpr int kSlice = kTiles * Tile<kD>::kBytes;  // in a stage
  static constexpr int kStageBytes = kSlice + kSlices * Slice<kColumns>::kBytes;
  static constexpr int kState = kStages * kStageBytes;                      // Sᵀ, kColumns rows of D keys
  static constexpr int kWritten = kState + kColumns * Tile<kD>::kRowBytes;  // Nᵀ, kColumns rows of 64 tokens
  static constexpr int kBytes = kWritten + kColumns * Tile<kChunk>::kRowBytes;
};

/// Thread blocks of a sequence that load tiles together: each fetches a part and gives it to all, since blocks of 16
/// columns that fetched for themselves would ask more of L2 than it has.
template <int kD, int kColumns>
constexpr int kCluster = kD / kColumns < 4 ? kD / kColumns : 4;

/// A thread block's columns of one sequence. Blocks of a cluster go through the same chunks.
template <int kD, int kColumns, bool kBackwards>
struct ScanBlock {
  using S = ScanSmem<kD, kColumns, kBackwards>;
  static constexpr int kBlocks = kCluster<kD, kColumns>;
  const Args& a;
  char* smem;
  uint64_t *full, *empty;  // of each stage
  const uint32_t base = ptx::smem_u32(smem);
  const int first_column = blockIdx.x * kColumns, chunks = static_cast<int>(a.chunks);
  const int64_t sequence = blockIdx.y;

  __device__ __forceinline__ uint32_t stage(int slot) const { return base + slot * S::kStageBytes; }
  /// The chunk of step i.
  __device__ __forceinline__ Place<kD> place(int i) const {
    return Place<kD>(a, sequence, kBackwards ? chunks - 1 - i : i);
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < S::kStages; ++i) {
        ptx::mbarrier_init(&full[i], 1 + 32);
        ptx::mbarrier_init(&empty[i], kBlocks);
      }
      ptx::fence_barrier_init();
    }
  }

  /// One warp: tiles by the copy engine, this block's part to all blocks of the cluster; slices by the lanes.
  __device__ __forceinline__ void load() const {
    constexpr int kPart = Tile<kD>::kBytes / kBlocks;
    const uint32_t part = ptx::cluster_rank() * kPart;
    ptx::Ring<S::kStages> ring;
    for (int i = 0; i < chunks; ++i, ring.advance()) {
      const auto at = place(i);
      ptx::mbarrier_wait(&empty[ring.slot], ring.parity ^ 1);
      if (lane_id() == 0) {
        ptx::mbarrier_arrive_expect_tx(&full[ring.slot], S::kTiles * Tile<kD>::kBytes);
        const bf16* from[3] = {a.k, a.w, a.q};
#pragma unroll
        for (int n = 0; n < S::kTiles; ++n)
          ptx::bulk_load_multicast(smem + ring.slot * S::kStageBytes + n * Tile<kD>::kBytes + part,
                                   from[n] + at.tile() + part / 2, kPart, &full[ring.slot], (1 << kBlocks) - 1);
      }
      __syncwarp();
      const Slice<kColumns> slice{stage(ring.slot) + S::kSlice}, d_o{slice.base + Slice<kColumns>::kBytes};
      slice.template load_image<kD>((kBackwards ? a.dn : a.u) + at.tile(), first_column);
      if constexpr (kBackwards) d_o.load(a.g.d_o + at.packed(a) + first_column, a.p.heads * kD, at.valid);
      copy_arrive(&full[ring.slot]);
    }
  }
};

/// A value that is made once and kept in a register; what the compiler makes again stands in the way of the chain.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// A warp's part of a scan: of a block's columns a quarter of the keys of Sᵀ, and 16 tokens of Nᵀ (backwards: of dSᵀ
/// and dNᵀ). Sums begin with the warp's own quarter, which it has in registers.
template <int kD, int kColumns, bool kBackwards>
struct ScanWarp {
  using Block = ScanBlock<kD, kColumns, kBackwards>;
  using S = typename Block::S;
  // Tiles of 16 columns, of own keys, of all keys.
  static constexpr int kGroups = kColumns / 16, kKeys = kD / kSplit, kOwn = kKeys / 16, kSteps = kD / 16;
  // Bytes from 16 tokens, or columns, to the next.
  static constexpr int kTileRows = 16 * Tile<kD>::kRowBytes, kSliceRows = Slice<kColumns>::kBytes / kSplit,
                       kWrittenRows = 16 * Tile<kChunk>::kRowBytes;
  static constexpr int kSaves = kColumns * kD / 8 / kChainThreads;  // 16-byte pieces of the state a thread
  const Block& x;
  const int warp = threadIdx.x / 32;
  // Addresses in shared memory. In a stage: operands of the two products (from there on, of 16 tokens each), slices.
  uint32_t state_at[kSteps], written_at[kSplit], first_at[kSteps], second_at[kOwn], turn[kSplit], slice_at[kGroups],
      saved_at, empty_at;
  StateRows<kD> state[kGroups];
  uint32_t own[kGroups][kOwn][4];                      // of the state, as it is read
  uint32_t first[kSteps][4], second[kSplit][kOwn][4];  // W and k, or k and W
  bf16* to;

  __device__ __forceinline__ ScanWarp(const Block& block, const float* from) : x(block) {
    const int lane = lane_id(), r = lane / 16 * 8 + lane % 8, c = lane / 8 % 2;
    const Tile<kD> states{x.base + S::kState}, k{0}, w{Tile<kD>::kBytes};
    const Tile<kChunk> written{x.base + S::kWritten};
    const auto &a = kBackwards ? k : w, &b = kBackwards ? w : k;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int step = (kOwn * warp + i) % kSteps;
      state_at[i] = kept(states.at(lane % 16, 2 * step + lane / 16));
      first_at[i] = kept(a.at(16 * warp + r, 2 * step + c));
    }
#pragma unroll
    for (int i = 0; i < kSplit; ++i) {
      const int quarter = (warp + i) % kSplit;
      written_at[i] = kept(written.at(lane % 16, 2 * quarter + lane / 16));
      turn[i] = kept(quarter * kTileRows);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) second_at[i] = kept(b.at(lane % 16, kKeys / 8 * warp + 2 * i + lane / 16));
#pragma unroll
    for (int g = 0; g < kGroups; ++g) slice_at[g] = kept(Slice<kColumns>{S::kSlice}.at(r, 2 * g + c));
    saved_at = kept(states.at(threadIdx.x / (kD / 8), threadIdx.x % (kD / 8)));
    empty_at = kept(ptx::map_to_block(&x.empty[0], warp % Block::kBlocks));
    to = (kBackwards ? x.a.behind : x.a.before) + x.place(0).state() + x.first_column * kD + threadIdx.x * 8;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      state[g].read(from ? from + x.sequence * kD * kD : nullptr, x.first_column + 16 * g, kKeys * warp);
    publish();
  }

  __device__ __forceinline__ static void sync() { ptx::named_barrier_sync(1, kChainThreads); }

  /// The state, rounded, to the other warps.
  __device__ __forceinline__ void publish() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        pack_a(own[g][i], state[g].s[2 * i], state[g].s[2 * i + 1]);
        put_a(state_at[i] + g * kTileRows, own[g][i]);
      }
  }
  /// The state before the chunk (behind it, in reverse) goes out.
  __device__ __forceinline__ void save() {
#pragma unroll
    for (int i = 0; i < kSaves; ++i)
      *reinterpret_cast<uint4*>(to + i * kChainThreads * 8) = load_shared_16(saved_at + i * kChainThreads * 16);
    to += kBackwards ? -kD * kD : kD * kD;
  }
  /// The state's other operand: this warp's tokens.
  __device__ __forceinline__ void read_first(uint32_t stage) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) load_matrices(first[i], stage + first_at[i]);
  }
  /// The other operand of what is written: this warp's keys.
  __device__ __forceinline__ void read_second(uint32_t stage) {
#pragma unroll
    for (int t = 0; t < kSplit; ++t)
#pragma unroll
      for (int i = 0; i < kOwn; ++i) load_matrices_transposed(second[t][i], stage + second_at[i] + turn[t]);
  }
  __device__ __forceinline__ void add_first(float (&sum)[2][2][4], int i, const uint32_t (&f)[4]) const {
    mma(sum[i % 2][0], f, first[i][0], first[i][1]);
    mma(sum[i % 2][1], f, first[i][2], first[i][3]);
  }
  __device__ __forceinline__ void add_to_state(int g, const uint32_t (&f)[4], const uint32_t (&b)[kOwn][4]) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      mma(state[g].s[2 * i], f, b[i][0], b[i][1]);
      mma(state[g].s[2 * i + 1], f, b[i][2], b[i][3]);
    }
  }
  /// dSᵀ += doᵀq / √D, half of the tokens.
  __device__ __forceinline__ void add_outputs(uint32_t stage, int half) {
#pragma unroll
    for (int t = 2 * half; t < 2 * half + 2; ++t) {
      uint32_t b[kOwn][4];
#pragma unroll
      for (int i = 0; i < kOwn; ++i)
        load_matrices_transposed(b[i], stage + second_at[i] + Tile<kD>::kBytes + t * kTileRows);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint32_t f[4];
        load_matrices_transposed(f, stage + slice_at[g] + Slice<kColumns>::kBytes + t * kSliceRows);
        add_to_state(g, f, b);
      }
    }
  }
  /// This warp's tokens of Nᵀ, or of -dNᵀ, to the other warps; `u`: what the sums are taken from, or added to.
  __device__ __forceinline__ void put_written(int g, const float (&sum)[2][2][4], const uint32_t (&u)[4]) {
    float y[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float start = e % 2 ? high_of(u[e / 2]) : low_of(u[e / 2]);
      y[e / 4][e % 4] = (kBackwards ? -start : start) - sum[0][e / 4][e % 4] - sum[1][e / 4][e % 4];
    }
    uint32_t f[4];
    pack_a(f, y[0], y[1]);
    put_a(written_at[0] + g * kWrittenRows, f);
    add_to_state(g, f, second[0]);
  }

  /// One chunk: Nᵀ = Uᵀ - SᵀWᵀ and Sᵀ += Nᵀk, or dNᵀ += dSᵀkᵀ and dSᵀ += doᵀq / √D - dNᵀW. `next` waits for the stage
  /// of the next chunk and returns where it is.
  template <class Next>
  __device__ __forceinline__ void step(uint32_t stage, int slot, Next next) {
    float sum[kGroups][2][2][4];  // two chains each
    uint32_t others[kGroups][kSteps][4], u[kGroups][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      clear(sum[g][0]), clear(sum[g][1]);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) add_first(sum[g], i, own[g][i]);
    }
    sync();  // the state is there
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int i = kOwn; i < kSteps; ++i) load_matrices(others[g][i], state_at[i] + g * kTileRows);
      load_matrices_transposed(u[g], stage + slice_at[g] + kSliceRows * warp);
    }
    read_second(stage);
    save();
    const uint32_t next_stage = next();  // a branch, before which the compiler leaves the loads
    if constexpr (kBackwards) add_outputs(stage, 0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = kOwn; i < kSteps; ++i) add_first(sum[g], i, others[g][i]);
    if constexpr (kBackwards) add_outputs(stage, 1);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) put_written(g, sum[g], u[g]);
    sync();  // all is written, and the stage is read
    uint32_t f[kGroups][kSplit][4];
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int t = 1; t < kSplit; ++t) load_matrices(f[g][t], written_at[t] + g * kWrittenRows);
    read_first(next_stage);
    if (lane_id() == 0 && warp < Block::kBlocks) ptx::mbarrier_arrive_cluster(empty_at + 8 * slot);
    __syncwarp();
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int t = 1; t < kSplit; ++t) add_to_state(g, f[g][t], second[t]);
    publish();
  }

  __device__ __forceinline__ void run() {
    ptx::Ring<S::kStages> ring;
    ptx::mbarrier_wait(&x.full[0], 0);
    read_first(x.stage(0));
    for (int i = 0; i < x.chunks; ++i) {
      const int slot = ring.slot;
      step(x.stage(slot), slot, [&] {
        ring.advance();
        if (i + 1 < x.chunks) ptx::mbarrier_wait(&x.full[ring.slot], ring.parity);
        return x.stage(ring.slot);  // behind the last chunk whatever is there: nothing is multiplied by it
      });
    }
    float* last = (kBackwards ? x.a.g.dfirst : x.a.last) + x.sequence * kD * kD;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) state[g].write(last, x.first_column + 16 * g, kKeys * warp);
  }
};

template <int kD, int kColumns, bool kBackwards>
__global__ void __cluster_dims__(kCluster<kD, kColumns>, 1, 1) __launch_bounds__(kScanThreads, 1)
    scan_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char smem[];
  constexpr int kStages = ScanSmem<kD, kColumns, kBackwards>::kStages;
  __shared__ uint64_t full[kStages], empty[kStages];
  const ScanBlock<kD, kColumns, kBackwards> block{a, smem, full, empty};
  block.init_barriers();
  ptx::cluster_sync();
  if (threadIdx.x >= kChainThreads) {
    block.load();
  } else {
    ScanWarp<kD, kColumns, kBackwards>(block, kBackwards ? a.g.dlast : a.p.first).run();
  }
  ptx::cluster_sync();  // others may still write to this block's memory
}

}  // namespace fox::cuda::delta_net
