#pragma once

// Forward pass of forgetting attention on SM90 (Hopper): TMA, WGMMA, warp specialisation, a persistent scheduler.
//
// Warpgroup 0 is the producer: one thread takes tiles from a counter and fills rings of K, V and bias stages; a warp
// for each of the other warpgroups works out what the rows of the next tile bring to the bias. Those warpgroups own 64
// query rows of the tile each and go over its key blocks from right to left. In each step a warpgroup issues S_n = Q
// K_n^T and O += P_{n+1} V_{n+1} together and computes the softmax of S_n while the second runs; a ring of named
// barriers lets one warpgroup at a time issue, so one's softmax overlaps another's products. The first scores of the
// next tile are issued beside the last values of this one, under which its O goes out.
//
// The bias comes in through the tensor cores: one more k16 step of Q K^T adds bias_j, the fall of c from key j to the
// end e of its block of 64 in units of q·k (BiasTile). A logit in log2 units is then t_ij = s_ij * scale * log2e + (c_i
// - c_e), and the softmax is that of plain attention with another constant per row and block. In the row's own block
// that step adds bias_j - bias_i or nearly so, since there c may fall by thousands while the keys that matter lie next
// to the row.
//
// Keys that together are less of a row than rounding its weights changes it by, whatever their logits, are far (see
// log_near_share): their tiles have no bias step. To a row they decay by all of c_i, more than they do, so that most of
// them become zeros.
//
// The maximum kept may lag the true one by kMaxLag, so that O is nearly never rescaled. Where the caller's bound of the
// logits shows that no weight can leave the range of its type, the maximum is not computed at all.

#include <type_traits>

#include "kernels/cuda/forgetting_attn_prefix.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/cuda/tiles.h"
#include "kernels/cuda/wgmma.cuh"

namespace fox::cuda {

struct ForwardArgs {
  CUtensorMap q, k, v, o;
  ForgettingAttnPrefix prefix;
  const int64_t* seq_start;
  const float* logit_bound;
  float* lse;
  float scale_log2;
  int32_t heads, group, query_len, key_len;
  int32_t tiles_m, total_heads, total_tiles, section;  // `section` heads are worked on side by side
};

template <typename T_, int kD_, bool kGate_>
struct ForwardTraits : ForwardTile<kD_> {
  using T = T_;
  using Tile = ForwardTile<kD_>;
  static constexpr bool kGate = kGate_;
  static constexpr int kD = kD_;
  static constexpr int kBlockM = 64 * Tile::kWarpgroups;
  static constexpr int kThreads = 128 * (Tile::kWarpgroups + 1);
  static constexpr int kPanels = (kD + 63) / 64;
  static constexpr int kQueryPanelBytes = kBlockM * 128, kKeyPanelBytes = Tile::kBlockN * 128;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes, kKeyBytes = kPanels * kKeyPanelBytes;
  // Largest bound of |t_ij - D_ij| in log2 units for which weights relative to bound - kMaxLag need no maximum: those
  // of D = 0, one in each row, are then above 2^(kMaxLag - 2 bound).
  static constexpr float kMaxBound = std::is_same_v<T, __half> ? 10.f : 48.f;
  // Together not more than the block starts with: 128 a thread of four warpgroups, 168 of three.
  static constexpr int kProducerRegisters = Tile::kWarpgroups == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = Tile::kWarpgroups == 3 ? 160 : 232;
};

/// What the producer tells the consumers of a tile, so that they wait for nothing but its Q.
template <int kWarpgroups>
struct TileInfo {
  int m, head, batch;        // m < 0: no more work
  float bound;               // of the logits, in log2 units
  int n_begin[kWarpgroups];  // first key tile that the rows of each warpgroup see
  int n_near[kWarpgroups];   // key tiles before this one are far, if the logits are bounded
};

/// A BiasTile, or the half of it that belongs to a tile of 64 keys.
template <int kKeys>
struct alignas(128) BiasStage {
  uint4 row[kKeys];
  float4 end;
};

/// What a row brings to the bias, in log2 units.
struct alignas(16) RowBias {
  float shift;        // c_i - the warpgroup's reference
  float own_shift;    // what ForwardSmem::own_bias leaves of c_i - c_e in its own block
  float since_start;  // c_i
};

template <typename Tr>
struct ForwardSmem {
  char q[Tr::kQueryStages][Tr::kQueryBytes];
  char k[Tr::kStages][Tr::kKeyBytes];
  char v[Tr::kStages][Tr::kKeyBytes];
  alignas(128) BiasStage<Tr::kGate ? Tr::kBlockN : 1> bias[Tr::kStages];
  // The side of Q of the bias, rows of 8: in the rows' own blocks, in all others, and the zeros behind them.
  uint4 own_bias[Tr::kQueryStages][Tr::kGate ? Tr::kBlockM : 0], ones[Tr::kGate ? 64 : 0], zeros[Tr::kGate ? 64 : 0];
  RowBias row_bias[Tr::kQueryStages][Tr::kGate ? Tr::kBlockM : 0];
  float2 reference[Tr::kQueryStages][Tr::kWarpgroups];  // prefix at the end of the block of the warpgroup's first row
  TileInfo<Tr::kWarpgroups> tile[2];
  uint64_t q_full[Tr::kQueryStages], q_empty[Tr::kQueryStages], k_full[Tr::kStages], k_empty[Tr::kStages],
      v_full[Tr::kStages], v_empty[Tr::kStages], tile_full[2], tile_empty[2];
};

/// One past the last key tile that rows up to position `last` see; at least one tile is always worked on.
template <int kBlockN>
__device__ __forceinline__ int tiles_up_to(int last, int key_len) {
  return max(0, min(last, key_len - 1)) / kBlockN + 1;
}

// ------------------------------------------------------------------------------------------------------- producer

template <typename Tr>
struct ForwardProducer {
  const ForwardArgs& a;
  ForwardSmem<Tr>& smem;
  ptx::Ring<Tr::kQueryStages> q;
  ptx::Ring<Tr::kStages> k, v;
  ptx::Ring<2> tile;
  using Info = TileInfo<Tr::kWarpgroups>;

  __device__ __forceinline__ Info decode(int index) const {
    if (index >= a.total_tiles) return {.m = -1};
    const int first = index / (a.section * a.tiles_m) * a.section;  // heads before this section
    const int width = min(a.section, a.total_heads - first);
    const int rest = index - first * a.tiles_m;
    const int position = first + rest % width;
    const int row = a.prefix.head_order ? a.prefix.head_order[position] : position;
    const int m = a.tiles_m - 1 - rest / width;  // longest first
    Info t{m, row % a.heads, row / a.heads};
    t.bound = a.logit_bound ? a.logit_bound[t.head] * float(kLog2e) : INFINITY;
    const bool has_far = Tr::kGate && a.prefix.near_begin && t.bound <= Tr::kMaxBound;
    for (int group = 0; group < Tr::kWarpgroups; ++group) {
      const int g = min(m * Tr::kWarpgroups + group, a.prefix.query_blocks - 1);
      const int64_t at = int64_t(row) * a.prefix.query_blocks + g;
      t.n_begin[group] = a.prefix.key_begin[at] * kBiasBlock / Tr::kBlockN;
      t.n_near[group] = has_far ? a.prefix.near_begin[at] * kBiasBlock / Tr::kBlockN : 0;
    }
    return t;
  }

  __device__ __forceinline__ void load_key(const Info& t, int kv_head, const BiasTile* bias, int n) {
    ptx::mbarrier_wait(&smem.k_empty[k.slot], k.parity ^ 1);
    uint64_t* bar = &smem.k_full[k.slot];
    // A tile that is far from all rows needs no biases, unless it may need a mask.
    const bool has_bias = Tr::kGate && (n >= t.n_near[0] || a.prefix.lower != nullptr);
    constexpr int kRowBytes = Tr::kBlockN * 16, kEndBytes = 16;
    ptx::mbarrier_arrive_expect_tx(bar, Tr::kKeyBytes + (has_bias ? kRowBytes + kEndBytes : 0));
#pragma unroll
    for (int panel = 0; panel < Tr::kPanels; ++panel)
      ptx::tma_load_4d(smem.k[k.slot] + panel * Tr::kKeyPanelBytes, &a.k, bar, panel * 64, n * Tr::kBlockN, kv_head,
                       t.batch, ptx::kEvictLast);
    if (has_bias) {
      const BiasTile& tile_bias = bias[n * Tr::kBlockN / 128];
      auto& stage = smem.bias[k.slot];
      if constexpr (Tr::kBlockN == 128) {
        ptx::bulk_load(&stage, &tile_bias, kRowBytes + kEndBytes, bar);
      } else {
        ptx::bulk_load(stage.row, tile_bias.row + n % 2 * 64, kRowBytes, bar);
        ptx::bulk_load(&stage.end, &tile_bias.end, kEndBytes, bar);
      }
    }
    k.advance();
  }

  __device__ __forceinline__ void load_value(const Info& t, int kv_head, int n) {
    ptx::mbarrier_wait(&smem.v_empty[v.slot], v.parity ^ 1);
    uint64_t* bar = &smem.v_full[v.slot];
    ptx::mbarrier_arrive_expect_tx(bar, Tr::kKeyBytes);
#pragma unroll
    for (int panel = 0; panel < Tr::kPanels; ++panel)
      ptx::tma_load_4d(smem.v[v.slot] + panel * Tr::kKeyPanelBytes, &a.v, bar, panel * 64, n * Tr::kBlockN, kv_head,
                       t.batch, ptx::kEvictLast);
    v.advance();
  }

  __device__ __forceinline__ void load_query(const Info& t) {
    ptx::mbarrier_wait(&smem.q_empty[q.slot], q.parity ^ 1);
    uint64_t* bar = &smem.q_full[q.slot];
    ptx::mbarrier_arrive_expect_tx(bar, Tr::kQueryBytes);
#pragma unroll
    for (int panel = 0; panel < Tr::kPanels; ++panel)
      ptx::tma_load_4d(smem.q[q.slot] + panel * Tr::kQueryPanelBytes, &a.q, bar, panel * 64, t.m * Tr::kBlockM, t.head,
                       t.batch, ptx::kEvictFirst);
    q.advance();
  }

  /// Tells the consumers and preparers of the tile of this index.
  __device__ __forceinline__ void tell(int index) {
    ptx::mbarrier_wait(&smem.tile_empty[tile.slot], tile.parity ^ 1);
    smem.tile[tile.slot] = decode(index);
    ptx::mbarrier_arrive(&smem.tile_full[tile.slot]);
    tile.advance();
  }

  __device__ __forceinline__ void run() {
    tell(blockIdx.x);
    Info t = smem.tile[0];
    int n = last_tile(t.m), kv_head = t.head / a.group;
    load_query(t);
    load_key(t, kv_head, bias_of(t), n);
    while (true) {
      const int next = gridDim.x + atomicAdd(a.prefix.counters, 1), slot = tile.slot;
      const BiasTile* bias = bias_of(t);
      bool has_told = false;  // behind the first copies: early enough, and they do not wait for the counter
#pragma unroll 1
      for (; n > t.n_begin[0]; --n) {
        load_key(t, kv_head, bias, n - 1);
        load_value(t, kv_head, n);
        if (!has_told) tell(next);
        has_told = true;
      }
      if (!has_told) tell(next);
      const Info u = smem.tile[slot];
      const int next_n = last_tile(u.m), next_kv_head = u.head / a.group;
      // The next tile's first scores stand before this one's last values; with one place for Q it is not free yet.
      if (u.m >= 0 && Tr::kQueryStages > 1) {
        load_query(u);
        load_key(u, next_kv_head, bias_of(u), next_n);
      }
      load_value(t, kv_head, n);
      if (u.m < 0) return;
      if (Tr::kQueryStages == 1) {
        load_query(u);
        load_key(u, next_kv_head, bias_of(u), next_n);
      }
      t = u, n = next_n, kv_head = next_kv_head;
    }
  }

  /// The key tile on the diagonal of query tile m, its first.
  __device__ __forceinline__ int last_tile(int m) const {
    const int last = min((m + 1) * Tr::kBlockM, a.query_len) - 1 + a.key_len - a.query_len;
    return tiles_up_to<Tr::kBlockN>(last, a.key_len) - 1;
  }
  __device__ __forceinline__ const BiasTile* bias_of(const Info& t) const {
    return Tr::kGate ? a.prefix.bias + (int64_t(t.batch) * a.heads + t.head) * (a.prefix.key_blocks / 2) : nullptr;
  }
};

// ---------------------------------------------------------------------------------------------------- rows' biases

/// One warp works out what the 64 rows of a warpgroup bring to the bias (see BiasTile) while the tile before is worked
/// on, which spares the warpgroup that time at the start of each tile. Q counts as full when this is there too.
template <typename Tr>
struct ForwardPreparer {
  const ForwardArgs& a;
  ForwardSmem<Tr>& smem;
  const int group, lane;
  ptx::Ring<Tr::kQueryStages> q;
  ptx::Ring<2> tile;
  static constexpr uint32_t kOnes = ptx::kBf16One << 16 | ptx::kBf16One;

  __device__ __forceinline__ static float2 end_of_block(const BiasTile* bias, int position) {
    return reinterpret_cast<const float2*>(&bias[position / 128].end)[position / kBiasBlock % 2];
  }

  __device__ __forceinline__ int clamped(int position) const { return min(max(0, position), a.key_len - 1); }

  /// Of the rows from position0 on, two a lane.
  __device__ __forceinline__ void prepare(const BiasTile* bias, int position0) {
    const int position[2] = {clamped(position0 + lane), clamped(position0 + lane + 32)};
    const float2 reference = end_of_block(bias, clamped(position0));
    float2 end[2];
    uint2 entry[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      end[i] = end_of_block(bias, position[i]);
      entry[i] = reinterpret_cast<const uint2&>(bias[position[i] / 128].row[position[i] % 128]);
    }
    ptx::mbarrier_wait(&smem.q_empty[q.slot], q.parity ^ 1);
    if (lane == 0) smem.reference[q.slot][group] = reference;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = group * 64 + lane + 32 * i;
      const float hi = __uint_as_float(entry[i].x << 16), mid = __uint_as_float(entry[i].x & 0xffff0000),
                  lo = __uint_as_float(entry[i].y << 16), own_shift = -(mid + lo) * a.scale_log2,
                  from_end = own_shift - hi * a.scale_log2;
      smem.row_bias[q.slot][row] = {pair_difference(end[i], reference) + from_end, own_shift, end[i].x + from_end};
      const uint64_t own = uint64_t{__float_as_uint(-hi) >> 16} << position[i] / kBiasBlock % 4 * 16;
      smem.own_bias[q.slot][row] = {kOnes, ptx::kBf16One | uint32_t(own) << 16, uint32_t(own >> 16),
                                    uint32_t(own >> 48)};
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.q_full[q.slot]);
    q.advance();
  }

  __device__ __forceinline__ void run() {
    while (true) {
      ptx::mbarrier_wait(&smem.tile_full[tile.slot], tile.parity);
      const int m = smem.tile[tile.slot].m, head = smem.tile[tile.slot].head, batch = smem.tile[tile.slot].batch;
      if (m < 0) return;
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.tile_empty[tile.slot]);
      tile.advance();
      prepare(a.prefix.bias + (int64_t(batch) * a.heads + head) * (a.prefix.key_blocks / 2),
              m * Tr::kBlockM + group * 64 + a.key_len - a.query_len);
    }
  }
};

// ------------------------------------------------------------------------------------------------------- consumer

/// A key tile that rows see as a whole, one of far blocks, one across the diagonal, or one that the window or a
/// document's start cuts.
enum class Where { kInside, kFar, kDiagonal, kEdge };
template <Where kWhere>
constexpr bool kIsMasked = kWhere == Where::kDiagonal || kWhere == Where::kEdge;

template <typename Tr>
struct ForwardConsumer {
  using T = typename Tr::T;
  static constexpr int kN = Tr::kBlockN, kD = Tr::kD, kWarpgroups = Tr::kWarpgroups;
  static constexpr int kHalves = kN / kBiasBlock;
  static constexpr float kMaxLag = 8.f;  // weights stay below 2^8, harmless in bf16 and fp16
  template <Where kWhere>
  static constexpr bool kHasBias = Tr::kGate && (kWhere != Where::kFar);
  static constexpr int kTurnBarrier = 1, kGroupBarrier = 1 + kWarpgroups;
  // Whether c_i - c_e is worked out before the values are issued, which takes until the tensor cores have read most of
  // P, and not while three warpgroups take turns.
  static constexpr bool kShiftFirst = Tr::kGate && kWarpgroups == 2;

  const ForwardArgs& a;
  ForwardSmem<Tr>& smem;
  const int group, warp, lane;  // warpgroup, warp in it, lane
  ptx::Ring<Tr::kQueryStages> q;
  ptx::Ring<Tr::kStages> k, v;
  ptx::Ring<2> tile;

  uint32_t q_word0, k_word0, v_word0;  // descriptor words of this warpgroup's rows of Q, of K and V, in slot 0

  // Per tile
  float2 reference;     // prefix at the end of the first row's block
  RowBias row_bias[2];  // of this thread's two rows
  int row0, position0;  // this warpgroup's first query row and its position
  int lower[2];         // first keys that the two rows see
  float row_max[2], row_sum[2];
  struct {
    int head, batch;
    int n_min;            // first key tile of the first warpgroup, and so of any
    int n_begin, n_end;   // key tiles of this warpgroup
    int n_near;           // those before are far
    int n_left, n_right;  // those from n_left on and before n_right need no mask
    float bound;          // of the logits, in log2 units
  } t;

  /// What is kept of a tile until its O has gone out, when the members above are the next one's.
  struct Done {
    int head, batch, row0, slot;
    float row_max[2], row_sum[2];
  };
  uint64_t* stored;  // q_empty of the last tile while its O is on its way out, or NULL

  __device__ __forceinline__ void wait_turn() { ptx::named_barrier_sync(kTurnBarrier + group, 256); }
  __device__ __forceinline__ void pass_turn() {
    ptx::named_barrier_arrive(kTurnBarrier + (group + 1 == kWarpgroups ? 0 : group + 1), 256);
  }
  __device__ __forceinline__ void release(uint64_t* bar) {
    if (lane == 0) ptx::mbarrier_arrive(bar);
  }
  __device__ __forceinline__ int own_row() const { return warp * 16 + lane / 4; }
  __device__ __forceinline__ int own_position(int row) const { return position0 + own_row() + 8 * row; }

  template <Where kWhere>
  __device__ __forceinline__ void issue_bias(float (&s)[kN / 2]) {
    if constexpr (kHasBias<kWhere>) {
      const uint32_t rows = ptx::smem_u32(kWhere == Where::kDiagonal ? &smem.own_bias[q.slot][group * 64] : smem.ones);
      const uint32_t keys = ptx::smem_u32(&smem.bias[0]) + k.slot * uint32_t{sizeof(smem.bias[0])};
      ptx::Wgmma<__nv_bfloat16, kN>::ss(s, ptx::descriptor_narrow(rows, ptx::smem_u32(smem.zeros) - rows),
                                        ptx::descriptor_narrow(keys, 0), false);
    }
  }

  template <Where kWhere>
  __device__ __forceinline__ void issue_scores(float (&s)[kN / 2]) {
    const uint32_t q_word = q_word0 + q.slot * (Tr::kQueryBytes / 16), k_word = k_word0 + k.slot * (Tr::kKeyBytes / 16);
#pragma unroll
    for (int step = 0; step < kD / 16; ++step)
      ptx::Wgmma<T, kN>::ss(s, ptx::descriptor(q_word + step / 4 * (Tr::kQueryPanelBytes / 16) + step % 4 * 2),
                            ptx::descriptor(k_word + step / 4 * (Tr::kKeyPanelBytes / 16) + step % 4 * 2),
                            kHasBias<kWhere> || step != 0);
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(float (&o)[kD / 2], const uint32_t (&p)[kN / 4]) {
    const uint32_t v_word = v_word0 + v.slot * (Tr::kKeyBytes / 16);
#pragma unroll
    for (int step = 0; step < kN / 16; ++step)
      ptx::Wgmma<T, kD>::template rs<1>(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                                        ptx::descriptor(v_word + step * (2048 / 16)), true);
    ptx::wgmma_commit();
  }

  /// c_i - c_e for this thread's rows and the blocks of key tile n; in far tiles c_i, which is loaded for each of them
  /// since at D 64 a softmax that begins at once costs 6 %.
  template <Where kWhere>
  __device__ __forceinline__ void block_shift(float (&shift)[kHalves][2], int n) const {
    if constexpr (kWhere == Where::kFar) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float4 bias = ptx::lds128(&smem.row_bias[q.slot][group * 64 + own_row() + 8 * row].shift);
        for (int half = 0; half < kHalves; ++half) shift[half][row] = bias.z;
      }
    } else if constexpr (Tr::kGate) {
      const float4 end = ptx::lds128(&smem.bias[k.slot].end.x);
      const float2 even = {end.x, end.y}, odd = {end.z, end.w};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        const float to_reference =
            pair_difference(reference, kHalves == 2 ? (half ? odd : even) : (n % 2 ? odd : even));
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const bool own = kWhere == Where::kDiagonal && own_position(row) / kBiasBlock == n * kHalves + half;
          shift[half][row] = own ? row_bias[row].own_shift : to_reference + row_bias[row].shift;
        }
      }
    }
  }

  /// -inf where this thread's rows must not look. Element e of s: row e / 2 % 2, column 8 (e / 4) + 2 (lane % 4) + e
  /// % 2.
  __device__ __forceinline__ void mask(float (&s)[kN / 2], int n) {
    const int column0 = n * kN + lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < kN / 2; ++e) {
      const int column = column0 + e / 4 * 8 + e % 2, row = e / 2 % 2;
      if (column > own_position(row) || column < lower[row]) s[e] = -INFINITY;
    }
  }

  /// Turns scores into weights relative to row_max, which it moves only when a row outgrows it by kMaxLag. Returns
  /// whether this warp must scale O by `alpha`.
  template <Where kWhere, bool kBounded>
  __device__ __forceinline__ bool softmax(float (&s)[kN / 2], const float (&shift)[kHalves][2], float (&alpha)[2],
                                          int n) {
    if constexpr (kIsMasked<kWhere>) mask(s, n);
    if constexpr (kBounded) {
      exponentiate<Where::kInside>(s, shift);
      return false;
    }
    float top[2] = {-INFINITY, -INFINITY};
    maximum(s, shift, top);
    bool grows = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      top[row] = fmaxf(top[row], __shfl_xor_sync(0xffffffff, top[row], 1));
      top[row] = fmaxf(top[row], __shfl_xor_sync(0xffffffff, top[row], 2));
      if constexpr (!Tr::kGate) top[row] *= a.scale_log2;
      grows |= top[row] > row_max[row] + kMaxLag;
    }
    grows = __any_sync(0xffffffff, grows);
    if (grows) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float higher = fmaxf(row_max[row], top[row]);
        alpha[row] = row_max[row] == -INFINITY ? 0.f : ptx::ex2(row_max[row] - higher);
        row_max[row] = higher;
        row_sum[row] *= alpha[row];
      }
    }
    exponentiate<kWhere>(s, shift);
    return grows;
  }

  __device__ __forceinline__ void maximum(const float (&s)[kN / 2], const float (&shift)[kHalves][2], float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      float here[2] = {s[half * 32], s[half * 32 + 2]};
#pragma unroll
      for (int e = 0; e < 32; ++e) here[e / 2 % 2] = fmaxf(here[e / 2 % 2], s[half * 32 + e]);
#pragma unroll
      for (int row = 0; row < 2; ++row)
        top[row] = fmaxf(top[row], Tr::kGate ? fmaf(here[row], a.scale_log2, shift[half][row]) : here[row]);
    }
  }

  template <Where kWhere>
  __device__ __forceinline__ void exponentiate(float (&s)[kN / 2], const float (&shift)[kHalves][2]) {
    float base[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) base[row] = kIsMasked<kWhere> && row_max[row] == -INFINITY ? 0.f : row_max[row];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const float add[2] = {Tr::kGate ? shift[half][0] - base[0] : -base[0],
                            Tr::kGate ? shift[half][1] - base[1] : -base[1]};
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int e = half * 32 + i;
        s[e] = ptx::ex2(fmaf(s[e], a.scale_log2, add[e / 2 % 2]));
        row_sum[e / 2 % 2] += s[e];
      }
    }
  }

  __device__ __forceinline__ static void pack(const float (&s)[kN / 2], uint32_t (&p)[kN / 4]) {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) p[i] = ptx::pack2<T>(s[2 * i], s[2 * i + 1]);
  }

  /// A block of the tile that this warpgroup's rows do not need: keep step with the others.
  __device__ __forceinline__ void skip_block() {
    ptx::mbarrier_wait(&smem.k_full[k.slot], k.parity);
    release(&smem.k_empty[k.slot]);
    ptx::mbarrier_wait(&smem.v_full[v.slot], v.parity);
    release(&smem.v_empty[v.slot]);
    k.advance(), v.advance();
    wait_turn(), pass_turn();
  }

  /// Softmax of the first block, whose scores are s.
  template <bool kBounded>
  __device__ __forceinline__ void first_block(float (&s)[kN / 2], uint32_t (&p)[kN / 4], int n) {
    float shift[kHalves][2], alpha[2];
    block_shift<Where::kDiagonal>(shift, n);
    __syncwarp();  // all lanes have read
    release(&smem.k_empty[k.slot]);
    softmax<Where::kDiagonal, kBounded>(s, shift, alpha, n);
    pack(s, p);
    k.advance();
  }

  /// Scores and softmax of block n, values of block n + 1.
  template <Where kWhere, bool kBounded>
  __device__ __forceinline__ void step(float (&o)[kD / 2], uint32_t (&p)[kN / 4], int n) {
    float s[kN / 2], shift[kHalves][2], alpha[2];
    ptx::mbarrier_wait(&smem.k_full[k.slot], k.parity);
    ptx::fence_registers(o);
    ptx::fence_registers(p);
    ptx::wgmma_fence();
    issue_bias<kWhere>(s);
    wait_turn();
    ptx::wgmma_fence();
    issue_scores<kWhere>(s);
    if constexpr (kShiftFirst) {
      block_shift<kWhere>(shift, n);
      ptx::fence_registers(shift[0]);
      ptx::fence_registers(shift[kHalves - 1]);
    }
    ptx::mbarrier_wait(&smem.v_full[v.slot], v.parity);
    ptx::wgmma_fence();
    issue_values(o, p);
    pass_turn();
    if constexpr (!kShiftFirst) block_shift<kWhere>(shift, n);
    ptx::wgmma_wait<1>();
    ptx::fence_registers(s);
    release(&smem.k_empty[k.slot]);
    const bool rescale = softmax<kWhere, kBounded>(s, shift, alpha, n);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(o);
    ptx::fence_registers(p);
    release(&smem.v_empty[v.slot]);
    pack(s, p);
    if (rescale) {
#pragma unroll
      for (int e = 0; e < kD / 2; ++e) o[e] *= alpha[e / 2 % 2];
    }
    k.advance(), v.advance();
  }

  /// Key tiles n down to t.n_begin, whose first scores are s, all but the values of the last.
  template <bool kBounded>
  __device__ __forceinline__ void all_scores(float (&s)[kN / 2], float (&o)[kD / 2], uint32_t (&p)[kN / 4], int n) {
    first_block<kBounded>(s, p, n);
    finish_store();
    for (--n; n >= max(t.n_right, t.n_begin); --n) step<Where::kDiagonal, kBounded>(o, p, n);
    for (; n >= max(t.n_left, kBounded ? max(t.n_near, t.n_begin) : t.n_begin); --n)
      step<Where::kInside, kBounded>(o, p, n);
    if constexpr (Tr::kGate && kBounded)
      for (; n >= max(t.n_left, t.n_begin); --n) step<Where::kFar, kBounded>(o, p, n);
    for (; n >= t.n_begin; --n) step<Where::kEdge, kBounded>(o, p, n);
  }

  /// Issues the values of the last block.
  __device__ __forceinline__ void last_values(float (&o)[kD / 2], uint32_t (&p)[kN / 4], int padding_rows) {
    ptx::mbarrier_wait(&smem.v_full[v.slot], v.parity);
    if (padding_rows > 0) clear_padding(min(padding_rows, kN));
    ptx::fence_registers(o);
    ptx::fence_registers(p);
    ptx::wgmma_fence();
    issue_values(o, p);
  }

  /// Left padding may hold NaN, and 0 * NaN is NaN. Every warpgroup writes the same zeros.
  __device__ __forceinline__ void clear_padding(int rows) {
    for (int i = warp * 32 + lane; i < rows * 8 * Tr::kPanels; i += 128) {
      const int row = i / (8 * Tr::kPanels), panel = i / 8 % Tr::kPanels;
      *reinterpret_cast<uint4*>(smem.v[v.slot] + panel * Tr::kKeyPanelBytes + row * 128 + i % 8 * 16) = uint4{};
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kGroupBarrier + group, 128);
  }

  /// Sends O of a tile on its way through the place of its Q, and lse.
  __device__ __forceinline__ void store(float (&o)[kD / 2], const Done& done) {
    float inverse[2];
    const int64_t head_row = int64_t(done.batch) * a.heads + done.head;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float sum = done.row_sum[row];
      sum += __shfl_xor_sync(0xffffffff, sum, 1);
      sum += __shfl_xor_sync(0xffffffff, sum, 2);
      inverse[row] = sum == 0 ? 0.f : 1.f / sum;  // NaN stays NaN
      const int i = done.row0 + own_row() + 8 * row;
      if (lane % 4 == 0 && i < a.query_len)
        a.lse[head_row * a.query_len + i] = sum == 0 ? -INFINITY : (done.row_max[row] + ptx::lg2(sum)) * 0.69314718f;
    }
    ptx::named_barrier_sync(kGroupBarrier + group, 128);  // all four warps are done with Q, whose place O takes
    const uint32_t base = ptx::smem_u32(smem.q[done.slot]) + group * 64 * 128;
    // An x4 store covers 16 rows by 16 columns: matrices (rows, columns) (0, 0), (8, 0), (0, 8), (8, 8).
    const uint32_t target_row = warp * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      uint32_t packed[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float scale = inverse[part % 2];
        const int e = 8 * i + part / 2 * 4 + part % 2 * 2;
        // A row that sees nothing is 0, whatever its weights of 0 met in V.
        packed[part] = scale == 0 ? 0u : ptx::pack2<T>(o[e] * scale, o[e + 1] * scale);
      }
      const uint32_t chunk = i % 4 * 2 + lane / 16;
      ptx::stmatrix_x4(base + i / 4 * Tr::kQueryPanelBytes + ptx::swizzle128(target_row, chunk), packed[0], packed[1],
                       packed[2], packed[3]);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_sync(kGroupBarrier + group, 128);
    if (warp == 0 && lane == 0 && done.row0 < a.query_len) {
#pragma unroll
      for (int panel = 0; panel < Tr::kPanels; ++panel)
        ptx::tma_store_4d(&a.o, smem.q[done.slot] + panel * Tr::kQueryPanelBytes + group * 64 * 128, panel * 64,
                          done.row0, done.head, done.batch);
      ptx::bulk_commit();
    }
    stored = &smem.q_empty[done.slot];
    if (Tr::kQueryStages == 1) finish_store();
  }

  /// Until the copy engine has read the last tile's O, whose place is then free for Q.
  __device__ __forceinline__ void finish_store() {
    if (warp == 0 && lane == 0 && stored) {
      ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive(stored);
    }
    stored = nullptr;
  }

  /// Takes the next tile, up to its first block's K; false if there is none.
  __device__ __forceinline__ bool begin() {
    ptx::mbarrier_wait(&smem.tile_full[tile.slot], tile.parity);
    const TileInfo<kWarpgroups>& info = smem.tile[tile.slot];
    const int m = ptx::uniform(info.m);
    if (m < 0) return false;
    t.head = ptx::uniform(info.head), t.batch = ptx::uniform(info.batch), t.n_min = ptx::uniform(info.n_begin[0]);
    t.n_near = ptx::uniform(info.n_near[group]);
    t.bound = ptx::uniform(info.bound);
    const int n_seen = ptx::uniform(info.n_begin[group]);
    release(&smem.tile_empty[tile.slot]);
    tile.advance();
    const int offset = a.key_len - a.query_len;
    row0 = m * Tr::kBlockM + group * 64;
    position0 = row0 + offset;
    const int last_row = min(row0 + 63, a.query_len - 1);
    const int n_max = tiles_up_to<kN>(min((m + 1) * Tr::kBlockM, a.query_len) - 1 + offset, a.key_len);
    t.n_end = min(n_max, tiles_up_to<kN>(position0 + 63, a.key_len)), t.n_begin = t.n_end - 1, t.n_left = 0;
    t.n_right = max(0, position0 + 1) / kN;  // from here on some row must not see all keys
    lower[0] = lower[1] = 0;
    if (row0 < a.query_len) {
      t.n_begin = n_seen;
      if (a.prefix.lower) {
        const int32_t* of_row = a.prefix.lower + int64_t(t.batch) * a.query_len;
        lower[0] = of_row[min(row0 + own_row(), last_row)];
        lower[1] = of_row[min(row0 + own_row() + 8, last_row)];
        t.n_left = (ptx::uniform(of_row[last_row]) + kN - 1) / kN;
      }
    }
    row_max[0] = row_max[1] = t.bound <= Tr::kMaxBound ? t.bound - kMaxLag : -INFINITY;
    row_sum[0] = row_sum[1] = 0;
    ptx::mbarrier_wait(&smem.q_full[q.slot], q.parity);
    if constexpr (Tr::kGate) {
      reference = smem.reference[q.slot][group];
      for (int row = 0; row < 2; ++row) row_bias[row] = smem.row_bias[q.slot][group * 64 + own_row() + 8 * row];
    }
#pragma unroll 1
    for (int n = n_max - 1; n >= t.n_end; --n) skip_block();
    ptx::mbarrier_wait(&smem.k_full[k.slot], k.parity);
    return true;
  }

  /// Scores of a tile's first block. They wait for no turn: the warpgroup that begins a tile would hold the others up.
  /// Without a tile (behind the last one) they are of what lies there, and nobody looks at them.
  __device__ __forceinline__ void issue_first(float (&s)[kN / 2]) {
    ptx::wgmma_fence();
    issue_bias<Where::kDiagonal>(s);
    issue_scores<Where::kDiagonal>(s);
  }

  __device__ __forceinline__ void run() {
    q_word0 = ptx::descriptor_word(ptx::smem_u32(smem.q[0]) + group * 64 * 128);
    k_word0 = ptx::descriptor_word(ptx::smem_u32(smem.k[0]));
    v_word0 = ptx::descriptor_word(ptx::smem_u32(smem.v[0]), Tr::kKeyPanelBytes);
    if (group == kWarpgroups - 1) pass_turn();  // warpgroup 0 begins
    float s[kN / 2];
    bool has_work = begin();
    issue_first(s);
    ptx::wgmma_wait<0>();
    ptx::fence_registers(s);
#pragma unroll 1
    while (has_work) {
      float o[kD / 2];
#pragma unroll
      for (int e = 0; e < kD / 2; ++e) o[e] = 0;
      uint32_t p[kN / 4];
      if (t.bound <= Tr::kMaxBound)
        all_scores<true>(s, o, p, t.n_end - 1);
      else
        all_scores<false>(s, o, p, t.n_end - 1);
      last_values(o, p, a.seq_start ? ptx::uniform(int(a.seq_start[t.batch])) - t.n_begin * kN : 0);
      uint64_t* last_v = &smem.v_empty[v.slot];
      v.advance();
      // Blocks to skip, or a Q that waits for O's way out, come only after these values.
      if (Tr::kQueryStages == 1 || t.n_begin > t.n_min) {
        ptx::wgmma_wait<0>();
        ptx::fence_registers(o);
        release(last_v);
        last_v = nullptr;
      }
#pragma unroll 1
      for (int n = t.n_begin - 1; n >= t.n_min; --n) skip_block();
      const Done done{t.head, t.batch, row0, q.slot, {row_max[0], row_max[1]}, {row_sum[0], row_sum[1]}};
      if constexpr (Tr::kQueryStages == 1) store(o, done);
      q.advance();
      has_work = begin();
      issue_first(s);
      ptx::wgmma_wait<1>();
      ptx::fence_registers(o);
      if (last_v) release(last_v);
      if constexpr (Tr::kQueryStages > 1) store(o, done);
      ptx::wgmma_wait<0>();
      ptx::fence_registers(s);
    }
    finish_store();
    // The ring hands the turn on once more than it is taken: the first warpgroup collects it.
    if (group == 0) wait_turn();
  }
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    forgetting_attn_forward_kernel(const __grid_constant__ ForwardArgs a) {
  extern __shared__ char raw[];
  // By an offset, not by rounding an address, so that the compiler still knows it to be of shared memory.
  auto& smem = *reinterpret_cast<ForwardSmem<Tr>*>(raw + (-ptx::smem_u32(raw) & 1023));
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.q, &a.k, &a.v, &a.o}) ptx::prefetch_tensor_map(map);
    constexpr int kWarps = 4 * Tr::kWarpgroups, kPreparers = Tr::kGate ? Tr::kWarpgroups : 0;
    for (int i = 0; i < Tr::kQueryStages; ++i)
      ptx::mbarrier_init(&smem.q_full[i], 1 + kPreparers), ptx::mbarrier_init(&smem.q_empty[i], Tr::kWarpgroups);
    for (int i = 0; i < Tr::kStages; ++i) {
      ptx::mbarrier_init(&smem.k_full[i], 1), ptx::mbarrier_init(&smem.k_empty[i], kWarps);
      ptx::mbarrier_init(&smem.v_full[i], 1), ptx::mbarrier_init(&smem.v_empty[i], kWarps);
    }
    for (int i = 0; i < 2; ++i)
      ptx::mbarrier_init(&smem.tile_full[i], 1), ptx::mbarrier_init(&smem.tile_empty[i], kWarps + kPreparers);
    ptx::fence_barrier_init();
  }
  if (Tr::kGate && threadIdx.x < 64) {
    smem.ones[threadIdx.x] = {0x3f803f80, 0x3f80, 0, 0};
    smem.zeros[threadIdx.x] = {};
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Tr::kProducerRegisters>();
    const int warp = ptx::uniform(threadIdx.x / 32);
    if (warp == 0) {
      if (ptx::elect_one()) ForwardProducer<Tr>{a, smem}.run();
    } else if (Tr::kGate && warp <= Tr::kWarpgroups) {
      ForwardPreparer<Tr>{a, smem, warp - 1, int(threadIdx.x % 32)}.run();
    }
  } else {
    ptx::setmaxnreg_inc<Tr::kConsumerRegisters>();
    ForwardConsumer<Tr>{a, smem, warpgroup - 1, int(threadIdx.x / 32 % 4), int(threadIdx.x % 32)}.run();
  }
}

// ------------------------------------------------------------------------------------------------------- launcher

template <typename Tr>
cudaError_t launch_forward(const ForgettingAttnParams& p, const ForgettingAttnPrefix& prefix, int multiprocessors,
                           cudaStream_t stream) {
  ForwardArgs a{};
  cudaError_t error = make_tensor_map(&a.q, p.q, p.dtype, p.batch, p.query_len, p.query_heads, p.head_dim, Tr::kBlockM);
  if (!error) error = make_tensor_map(&a.k, p.k, p.dtype, p.batch, p.key_len, p.kv_heads, p.head_dim, Tr::kBlockN);
  if (!error) error = make_tensor_map(&a.v, p.v, p.dtype, p.batch, p.key_len, p.kv_heads, p.head_dim, Tr::kBlockN);
  if (!error) error = make_tensor_map(&a.o, p.o, p.dtype, p.batch, p.query_len, p.query_heads, p.head_dim, 64);
  if (error) return error;
  a.prefix = prefix;
  a.seq_start = p.seq_start;
  a.logit_bound = p.logit_bound;
  a.lse = static_cast<float*>(p.lse);
  a.scale_log2 = p.scale * float(kLog2e);
  a.heads = p.query_heads;
  a.group = p.query_heads / p.kv_heads;
  a.query_len = p.query_len;
  a.key_len = p.key_len;
  a.tiles_m = (p.query_len + Tr::kBlockM - 1) / Tr::kBlockM;
  a.total_heads = p.batch * p.query_heads;
  a.total_tiles = a.tiles_m * a.total_heads;
  const long long bytes = 4ll * p.key_len * p.head_dim;
  const long long fitting = kL2WorkingSet / bytes * a.group;
  a.section = int(fitting < 1 ? 1 : fitting > a.total_heads ? a.total_heads : fitting);

  auto* kernel = forgetting_attn_forward_kernel<Tr>;
  constexpr int kBytes = sizeof(ForwardSmem<Tr>) + 1024;
  static_assert(kBytes <= 227 * 1024);
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error) return error;
  return launch_early(kernel, min(multiprocessors, a.total_tiles), Tr::kThreads, kBytes, stream, a);
}

/// Defined for the pairs that forgetting_attn_fwd_sm90_*.cu instantiate.
template <typename T, int kHeadDim>
cudaError_t launch_forward_sm90(const ForgettingAttnParams& p, const ForgettingAttnPrefix& prefix, int multiprocessors,
                                cudaStream_t stream) {
  if (prefix.sums) return launch_forward<ForwardTraits<T, kHeadDim, true>>(p, prefix, multiprocessors, stream);
  return launch_forward<ForwardTraits<T, kHeadDim, false>>(p, prefix, multiprocessors, stream);
}

}  // namespace fox::cuda
