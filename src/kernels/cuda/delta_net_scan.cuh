#pragma once

// DeltaNet's chain of states (see delta_net_sm90.cu). Four warps own 16 or 32 columns of the state, transposed, as
// accumulators: a quarter of its keys each. Of Nᵀ each makes 16 tokens. What the others need of both goes through
// shared memory in bf16, as operands are rounded anyway: two barriers a chunk. What is not of the chain is fetched by a
// fifth warp, and is in registers before the chain needs it; a sixth sends the states out.

#include "kernels/cuda/cluster.cuh"
#include "kernels/cuda/delta_net_chunk.cuh"

namespace fox::cuda::delta_net {

/// Warps that share a block's columns, and quarters of a chunk's tokens.
constexpr int kSplit = 4;
constexpr int kChainThreads = 32 * kSplit, kScanThreads = kChainThreads + 64;
/// Hardware barriers: the state of a chunk is in shared memory (the sixth warp waits too); what is written is there.
constexpr int kStateBarrier = 1, kWrittenBarrier = 2;

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
  static constexpr int kTiles = kBackwards ? 3 : 2, kSlices = kBackwards ? 2 : 1;
  // What is fetched takes three or four steps to arrive.
  static constexpr int kStages = kBackwards ? (kColumns == 16 ? 4 : 3) : kColumns == 16 ? 6 : 4;
  static constexpr int kSlice = kTiles * Tile<kD>::kBytes;  // in a stage
  static constexpr int kStageBytes = kSlice + kSlices * Slice<kColumns>::kBytes;
  // Sᵀ, kColumns rows of D keys, three times: two go out while the next is made. Nᵀ, kColumns rows of 64 tokens.
  static constexpr int kStateBytes = kColumns * Tile<kD>::kRowBytes, kStates = 3;
  static constexpr int kState = kStages * kStageBytes, kWritten = kState + kStates * kStateBytes;
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
      if constexpr (kBackwards) d_o.load(a.g.d_o + at.packed(a.p, kD) + first_column, a.p.heads * kD, at.valid);
      copy_arrive(&full[ring.slot]);
    }
  }

  /// One warp: the state before each chunk (behind it, in reverse) goes out.
  __device__ __forceinline__ void save() const {
    bf16* to = (kBackwards ? a.behind : a.before) + place(0).state() + first_column * kD;
    for (int i = 0, turn = 0; i < chunks; ++i, turn = turn + 1 < S::kStates ? turn + 1 : 0) {
      ptx::named_barrier_sync(kStateBarrier, kChainThreads + 32);
      if (lane_id() == 0) {
        ptx::fence_proxy_async();
        ptx::bulk_store(to, smem + S::kState + turn * S::kStateBytes, S::kStateBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<S::kStates - 2>();  // the oldest is out: the chain may write there
      }
      __syncwarp();
      to += kBackwards ? -kD * kD : kD * kD;
    }
    if (lane_id() == 0) ptx::bulk_wait_read<0>();
  }
};

/// A value that is made once and kept in a register; what the compiler makes again stands in the way of the chain.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// The stage of the chunk after this one, if there is one.
struct NextStage {
  uint64_t* full;
  uint32_t parity;
  bool exists;
  __device__ __forceinline__ bool is_there() const { return !exists || ptx::mbarrier_test(full, parity); }
  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(full, parity); }
};

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
  const Block& x;
  const int warp = threadIdx.x / 32;
  // Addresses in shared memory. In a stage: operands of the two products (from there on, of 16 tokens each), slices.
  uint32_t state_at[kSteps], written_at[kSplit], first_at[kSteps], second_at[kOwn], turn[kSplit], slice_at[kGroups],
      empty_at;
  int states_left = S::kStates;  // places of a state before the first one's turn comes again
  StateRows<kD> state[kGroups];
  uint32_t own[kGroups][kOwn][4];                      // of the state, as it is read
  uint32_t first[kSteps][4], second[kSplit][kOwn][4];  // W and k, or k and W
  uint32_t written[kGroups][kSplit][4];                // Nᵀ or -dNᵀ, the warp's own tokens first
  const bool* passes_at;
  bool passes;  // of the next chunk: no document starts in it

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
    empty_at = kept(ptx::map_to_block(&x.empty[0], warp % Block::kBlocks));
    passes_at = x.a.passes + x.place(0).index;
    passes = *passes_at;
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      state[g].read(from ? from + x.sequence * kD * kD : nullptr, x.first_column + 16 * g, kKeys * warp);
    publish();
  }

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
  /// A document starts.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) clear(state[g].s);
    asm volatile("");  // a branch, not a selection in every step
  }
  /// The next state has another place.
  __device__ __forceinline__ void turn_state() {
    int step = S::kStateBytes;
    if (--states_left == 0) {
      states_left = S::kStates, step -= S::kStates * S::kStateBytes;
      asm volatile("");  // a branch
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) state_at[i] += step;
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
    for (int i = 0; i < 4; ++i) {
      const uint32_t start = kept(u[i]);  // not unpacked, and waited for, before the products
      const auto d = [&](int e) { return sum[0][i / 2][e] + sum[1][i / 2][e]; };
      const int e = i % 2 * 2;
      y[i / 2][e] = (kBackwards ? -low_of(start) : low_of(start)) - d(e);
      y[i / 2][e + 1] = (kBackwards ? -high_of(start) : high_of(start)) - d(e + 1);
    }
    pack_a(written[g][0], y[0], y[1]);
    put_a(written_at[0] + g * kWrittenRows, written[g][0]);
  }

  // One chunk: Nᵀ = Uᵀ - SᵀWᵀ and Sᵀ += Nᵀk, or dNᵀ += dSᵀkᵀ and dSᵀ += doᵀq / √D - dNᵀW. The compiler moves no load
  // across a branch; elsewhere it would put those behind the products which can be made without them.

  /// Up to what is written. `next` is the stage of the next chunk.
  __device__ __forceinline__ void write(uint32_t stage, int slot, const NextStage& next) {
    float sum[kGroups][2][2][4];  // two chains each
    uint32_t others[kGroups][kSteps][4], u[kGroups][4];
    ptx::named_barrier_sync(kStateBarrier, kChainThreads + 32);
    const bool next_is_there = next.is_there();  // asked early: the answer takes a while
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = kOwn; i < kSteps; ++i) load_matrices(others[g][i], state_at[i] + g * kTileRows);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) load_matrices_transposed(u[g], stage + slice_at[g] + kSliceRows * warp);
    if (!next_is_there) next.wait();
    read_second(stage);
    if (!passes) forget();
    if (next.exists) passes = *(passes_at += kBackwards ? -1 : 1);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      clear(sum[g][0]), clear(sum[g][1]);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) add_first(sum[g], i, own[g][i]);
    }
    if constexpr (kBackwards) add_outputs(stage, 0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = kOwn; i < kSteps; ++i) add_first(sum[g], i, others[g][i]);
    if constexpr (kBackwards) add_outputs(stage, 1);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) put_written(g, sum[g], u[g]);
    ptx::named_barrier_sync(kWrittenBarrier, kChainThreads);  // and the stage is read
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int t = 1; t < kSplit; ++t) load_matrices(written[g][t], written_at[t] + g * kWrittenRows);
    if (lane_id() == 0 && warp < Block::kBlocks) ptx::mbarrier_arrive_cluster(empty_at + 8 * slot);
    __syncwarp();
  }
  __device__ __forceinline__ void update() {
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int t = 0; t < kSplit; ++t) add_to_state(g, written[g][t], second[t]);
  }

  __device__ __forceinline__ void run() {
    ptx::Ring<S::kStages> ring;
    ptx::mbarrier_wait(&x.full[0], 0);
    read_first(x.stage(0));
    for (int i = 0;; ++i) {
      const int slot = ring.slot;
      ring.advance();
      const bool is_last = i + 1 == x.chunks;
      write(x.stage(slot), slot, {&x.full[ring.slot], ring.parity, !is_last});
      if (is_last) break;
      read_first(x.stage(ring.slot));
      turn_state();
      update();
      publish();
    }
    update();
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
  ptx::start_next_kernel();
  block.init_barriers();
  ptx::cluster_sync();
  if (threadIdx.x >= kChainThreads + 32) {
    block.save();
  } else if (threadIdx.x >= kChainThreads) {
    block.load();
  } else {
    ScanWarp<kD, kColumns, kBackwards>(block, kBackwards ? a.g.dlast : a.p.first).run();
  }
  ptx::cluster_sync();  // others may still write to this block's memory
}

}  // namespace fox::cuda::delta_net
