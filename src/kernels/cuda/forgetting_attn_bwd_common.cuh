#pragma once

// What the backward kernels (forgetting_attn_bwd_sm90.cuh for head sizes up to 128, forgetting_attn_bwd_wide_sm90.cuh
// above) have in common: which blocks of keys a CTA works on, one after the other, and what its warps do.
//
// Warpgroup 0: one thread takes blocks and loads (BackwardLoader), a warp sends dQ, dK and dV (backward_send), one
// works out the bias of far tiles (backward_far_rows), one those of the keys (backward_key_bias). All but the
// second run ahead of the two warpgroups that compute, so that at a new block's beginning these wait only for K and V,
// whose places are not free before (above D = 128 for Q and dO too). What a thread of theirs does with the scores of
// its keys is in BackwardScores: masks, biases, P, dS and its sums.

#include <algorithm>
#include <climits>
#include <type_traits>

#include "kernels/cuda/forgetting_attn_bwd.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace fox::cuda {

constexpr int kBackwardThreads = 384;
constexpr float kPreciseRange = 512.f;  // in log2 units: an ulp is 6e-5, well under the rounding of P

// Hardware barriers between roles.
enum BackwardBarrier {
  kBarrierDs = 1,
  kBarrierDqEmpty = 2,
  kBarrierDqFull = 4,
  kBarrierConsumers = 6,
  kBarrierKeyGradients = 8  // + 0, 1: a warpgroup's dV is there, + 2, 3: its dK
};

/// What a CTA works on at a time: a block of keys of one batch row and KV head, and the query tiles that may see it.
struct BackwardWork {
  int batch, kv_head, n;  // n < 0: no more work
  int m_begin;
  int key_low, query_low;  // first key and query that are not left padding
  int lower_row;           // from this query row on, some rows do not see the block's first key (window, documents)
  int m_end, m_near;       // of the group's first head, see backward_m_end() and backward_m_near()
};

/// How the loading thread tells the others in shared memory what comes next.
struct BackwardQueue {
  BackwardWork work[2];
  uint64_t full[2], empty[2];
};

/// The block of this index, without m_end and m_near.
template <int kM, int kN>
__device__ __forceinline__ BackwardWork backward_work(const BackwardArgs& a, int index) {
  // Sections of heads whose Q, dO and dQ fit the L2 together; in each the longest blocks first, and when pruning the
  // heads that keep most. In deterministic mode tiles of dQ receive their blocks from the diagonal down, so the blocks
  // must be taken in that order, and by CTAs that run.
  const int blocks = (a.key_len + kN - 1) / kN, heads = a.batch * a.kv_heads;
  if (index >= blocks * heads) return {.n = -1};
  const int section = index / (a.section_heads * blocks);
  const int rest = index - section * a.section_heads * blocks;
  const int size = min(a.section_heads, heads - section * a.section_heads);
  const int place = section * a.section_heads + rest % size;
  const int head = a.prefix.head_order != nullptr && a.group == 1 ? a.prefix.head_order[place] : place;
  BackwardWork w{};
  w.n = a.deterministic ? blocks - 1 - rest / size : rest / size;
  w.batch = head / a.kv_heads;
  w.kv_head = head % a.kv_heads;
  const int first_key = w.n * kN;
  w.key_low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[w.batch]) : 0;
  w.query_low = max(0, w.key_low - a.offset);
  w.m_begin = max(0, max(first_key, w.key_low) - a.offset) / kM;
  w.lower_row = INT_MAX;
  if (a.window > 0) w.lower_row = static_cast<int>(min(int64_t{first_key} + a.window - a.offset, int64_t{INT_MAX}));
  if (a.cu_seqlens != nullptr) {
    int document = 0, end = a.num_documents;  // the last one that starts at or before the block
    while (end - document > 1) {
      const int middle = (document + end) / 2;
      if (a.cu_seqlens[middle] <= first_key)
        document = middle;
      else
        end = middle;
    }
    w.lower_row = min(w.lower_row, static_cast<int>(a.cu_seqlens[document + 1]));
  }
  return w;
}

/// End of the query tiles that some of the block's keys reach, given how far each does for all heads.
template <int kM, int kN>
__device__ __forceinline__ int reached_tiles(const int32_t* reach, const BackwardArgs& a, const BackwardWork& w,
                                             int head) {
  const int64_t row = int64_t{w.batch} * a.heads + head;
  const int32_t* end = reach + row * a.prefix.key_blocks + w.n * (kN / kBiasBlock);
  int rows = 0;
#pragma unroll
  for (int i = 0; i < kN / kBiasBlock; ++i) rows = max(rows, end[i] * kBiasBlock);
  return max(w.m_begin, (min(rows, a.query_len) + kM - 1) / kM);
}
/// End of the query tiles that need the block for one query head.
template <int kM, int kN>
__device__ __forceinline__ int backward_m_end(const BackwardArgs& a, const BackwardWork& w, int head) {
  return head == w.kv_head * a.group ? w.m_end : reached_tiles<kM, kN>(a.prefix.query_end, a, w, head);
}
/// End of the near query tiles: what the block's keys weigh in the others is less than matters, see log_near_share().
/// INT_MAX if no tile is far.
template <int kM, int kN>
__device__ __forceinline__ int backward_m_near(const BackwardArgs& a, const BackwardWork& w, int head) {
  if (a.prefix.near_end == nullptr) return INT_MAX;
  return head == w.kv_head * a.group ? w.m_near : reached_tiles<kM, kN>(a.prefix.near_end, a, w, head);
}

/// u_i of row `x` of a tile, given the tile's table.
template <bool kByMma>
__device__ __forceinline__ float row_bias(const float* table, int x, float sigma) {
  if constexpr (!kByMma) return table[x];
  const uint4 row = reinterpret_cast<const uint4*>(table)[x];
  return (__uint_as_float(row.y & 0xffff0000u) + __uint_as_float(row.z << 16) + __uint_as_float(row.z & 0xffff0000u)) *
         sigma;
}

/// First row of a head in the padded tables of per-row values.
__device__ __forceinline__ int64_t table_row(const BackwardArgs& a, int batch, int head) {
  return (int64_t{batch} * a.heads + head) * a.padded_rows;
}

// ------------------------------------------------------------------------------------------------------- loads
template <typename Tile>
__device__ __forceinline__ void load_panels(void* dst, const CUtensorMap* map, uint64_t* full, int rows, int token,
                                            int head, int batch) {
#pragma unroll
  for (int p = 0; p < Tile::kPanels; ++p)
    ptx::tma_load_4d(static_cast<char*>(dst) + p * rows * 128, map, full, p * 64, token, head, batch,
                     ptx::kEvictNormal);
}

/// The thread that takes blocks of keys and loads what they need.
template <typename Tile>
struct BackwardLoader {
  const BackwardArgs& a;
  typename Tile::Shared& smem;
  ptx::Ring<Tile::kQueryStages> q;
  ptx::Ring<Tile::kGradientStages> d_o;
  ptx::Ring<1> keys;
  ptx::Ring<2> queue;
  static constexpr int kM = Tile::kM, kN = Tile::kN;
  // The next block is told when so many tiles of this one are left: in time for the other warps, while blocks are
  // still shared out evenly and in the order of the L2 (told at a block's start they cost 1 to 3 % at D 128).
  static constexpr int kTellAhead = 6;
  static constexpr uint32_t kKeyBytes = Tile::kPanels * kN * 128, kQueryBytes = Tile::kPanels * kM * 128;
  static constexpr uint32_t kBiasBytes = Tile::kRowTable * 4, kDeltaBytes = kM * 4 * Tile::kDeltaFloats;

  __device__ __forceinline__ void load_keys(const BackwardWork& w) {
    ptx::mbarrier_wait(&smem.k_empty, keys.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&smem.k_full, kKeyBytes);
    load_panels<Tile>(smem.k, &a.map_k, &smem.k_full, kN, w.n * kN, w.kv_head, w.batch);
    ptx::mbarrier_wait(&smem.v_empty, keys.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&smem.v_full, kKeyBytes);
    load_panels<Tile>(smem.v, &a.map_v, &smem.v_full, kN, w.n * kN, w.kv_head, w.batch);
    keys.advance();
  }
  __device__ __forceinline__ void load_query(const BackwardWork& w, int head, int m) {
    const int64_t row = table_row(a, w.batch, head) + m * kM;
    ptx::mbarrier_wait(&smem.q_empty[q.slot], q.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&smem.q_full[q.slot], kQueryBytes + kBiasBytes);
    load_panels<Tile>(smem.q[q.slot], &a.map_q, &smem.q_full[q.slot], kM, m * kM, head, w.batch);
    ptx::bulk_load(smem.row_bias[q.slot], a.row_bias + row / kM * Tile::kRowTable, kBiasBytes, &smem.q_full[q.slot]);
    q.advance();
  }
  __device__ __forceinline__ void load_gradient(const BackwardWork& w, int head, int m) {
    const int64_t row = table_row(a, w.batch, head) + m * kM;
    ptx::mbarrier_wait(&smem.do_empty[d_o.slot], d_o.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(&smem.do_full[d_o.slot], kQueryBytes + kDeltaBytes);
    load_panels<Tile>(smem.d_o[d_o.slot], &a.map_do, &smem.do_full[d_o.slot], kM, m * kM, head, w.batch);
    ptx::bulk_load(smem.delta[d_o.slot], a.delta + row * Tile::kDeltaFloats, kDeltaBytes, &smem.do_full[d_o.slot]);
    d_o.advance();
  }

  /// Tells the others of the block of this index, and has its keys and values brought into L2.
  __device__ __forceinline__ void tell(int index) {
    BackwardWork w = backward_work<kM, kN>(a, index);
    if (w.n >= 0) {
      const int head = w.kv_head * a.group;
      w.m_end = reached_tiles<kM, kN>(a.prefix.query_end, a, w, head);
      if (Tile::kFarLoop && a.prefix.near_end) w.m_near = reached_tiles<kM, kN>(a.prefix.near_end, a, w, head);
#pragma unroll
      for (int p = 0; p < Tile::kPanels; ++p) {
        ptx::tma_prefetch_4d(&a.map_k, p * 64, w.n * kN, w.kv_head, w.batch);
        ptx::tma_prefetch_4d(&a.map_v, p * 64, w.n * kN, w.kv_head, w.batch);
      }
    }
    ptx::mbarrier_wait(&smem.queue.empty[queue.slot], queue.parity ^ 1);
    smem.queue.work[queue.slot] = w;
    ptx::mbarrier_arrive(&smem.queue.full[queue.slot]);
    queue.advance();
  }
  __device__ __forceinline__ void tell_next() { tell(atomicAdd(a.prefix.counters + 1, 1)); }

  __device__ __forceinline__ void run() {
    int slot = 0;
    tell_next();
    while (true) {
      const BackwardWork w = smem.queue.work[slot];
      if (w.n < 0) return;
      slot ^= 1;
      bool has_told = false, has_keys = false;
      for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; ++head) {
        const int m_end = backward_m_end<kM, kN>(a, w, head);
        const bool is_last = head + 1 == (w.kv_head + 1) * a.group;
#pragma unroll 1
        for (int m = w.m_begin; m < m_end; ++m) {
          if (is_last && !has_told && m_end - m <= kTellAhead) {
            tell_next();
            has_told = true;
          }
          load_query(w, head, m);
          load_gradient(w, head, m);
          // Q and dO of a block's first tiles have places before K and V have.
          if (!has_keys) load_keys(w);
          has_keys = true;
        }
      }
      if (!has_keys) load_keys(w);
      if (!has_told) tell_next();
    }
  }
};

/// Hears from the loading thread what the CTA works on next; false if nothing. Called by whole warps.
template <typename Tile>
__device__ __forceinline__ bool next_work(typename Tile::Shared& smem, ptx::Ring<2>& queue, BackwardWork& w) {
  ptx::mbarrier_wait(&smem.queue.full[queue.slot], queue.parity);
  const BackwardWork& told = smem.queue.work[queue.slot];
  w = {ptx::uniform(told.batch),     ptx::uniform(told.kv_head), ptx::uniform(told.n),
       ptx::uniform(told.m_begin),   ptx::uniform(told.key_low), ptx::uniform(told.query_low),
       ptx::uniform(told.lower_row), ptx::uniform(told.m_end),   ptx::uniform(told.m_near)};
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&smem.queue.empty[queue.slot]);
  queue.advance();
  return w.n >= 0;
}

/// What consumers need to know of a block's keys for one head: the side of K of the bias, see bias_by_mma(), 64 rows a
/// warpgroup, or what threads add to the scores, (cref_n - c_j)·log2e; -inf for keys that are padding.
template <int kRows, bool kGate, bool kByMma>
struct KeyBias {
  static constexpr int kStages = 2;
  alignas(128) std::conditional_t<kByMma, uint4, float> row[kStages][kGate ? kRows : 1];
  // For the half of the k16 step that is not used, and in the place of all of it where exponents are made in float64.
  uint4 zeros[kByMma ? 64 : 1];
  float2 reference[kStages];  // cref_n·log2e as hi + lo
  float range[kStages];       // fall of c·log2e over the block
  uint64_t full[kStages], empty[kStages];
};
/// The warp that works it out, up to two heads ahead.
template <typename Tile>
__device__ __forceinline__ void backward_key_bias(const BackwardArgs& a, const BackwardWork& w,
                                                  typename Tile::Shared& smem, ptx::Ring<2>& ring) {
  constexpr int kN = Tile::kN;
  const int lane = threadIdx.x % 32;
  const int first = max(w.n * kN, w.key_low), last = min(w.n * kN + kN, a.key_len) - 1;
  for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; ++head) {
    if (w.m_begin >= backward_m_end<Tile::kM, kN>(a, w, head)) continue;
    const GatePrefix prefix(a, w.batch, head);
    const double reference = prefix(last);
    const float range = static_cast<float>(prefix(min(first, last)) - reference);
    float bias[kN / 32];
#pragma unroll
    for (int i = 0; i < kN / 32; ++i) {
      const int j = w.n * kN + 32 * i + lane;
      bias[i] = j >= w.key_low && j < a.key_len ? static_cast<float>(reference - prefix(j))
                                                : (Tile::kBiasByMma ? kNoWeight : -INFINITY);
    }
    ptx::mbarrier_wait(&smem.key_bias.empty[ring.slot], ring.parity ^ 1);
    if (lane == 0) {
      const float high = static_cast<float>(reference);
      smem.key_bias.reference[ring.slot] = {high, static_cast<float>(reference - high)};
      smem.key_bias.range[ring.slot] = range;
    }
#pragma unroll
    for (int i = 0; i < kN / 32; ++i) {
      auto& row = smem.key_bias.row[ring.slot][32 * i + lane];
      if constexpr (Tile::kBiasByMma) {
        const ptx::Bf16Triple part = ptx::split_bf16(bias[i] / a.sigma);
        row = {part.high | part.middle << 16, part.low | ptx::kBf16One << 16, ptx::kBf16One | ptx::kBf16One << 16, 0};
      } else {
        row = bias[i];
      }
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.key_bias.full[ring.slot]);
    ring.advance();
  }
}

/// The warp that gives far tiles (from `near` on, see backward_m_near) the one bias that a row has there: all of the
/// block's keys are taken to decay as its first one does, by more than they do, and by nothing that matters. A thread
/// then does in a far tile what it does without gates. Runs beside the copies of Q and fills the same stages.
template <typename Tile>
__device__ __forceinline__ void backward_far_rows(const BackwardArgs& a, const BackwardWork& w,
                                                  typename Tile::Shared& smem, ptx::Ring<Tile::kQueryStages>& q) {
  constexpr int kM = Tile::kM, kRows = kM / 32;  // of a lane
  const int lane = threadIdx.x % 32;
  for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; ++head) {
    const int m_end = backward_m_end<kM, Tile::kN>(a, w, head), m_near = backward_m_near<kM, Tile::kN>(a, w, head);
    const GatePrefix prefix(a, w.batch, head);
    const float2 before = prefix.block[w.n * Tile::kN / kBiasBlock];  // of the block's first key; not waited for yet
    const float rest = prefix.r[w.n * Tile::kN];
    const float* table = a.row_bias + table_row(a, w.batch, head) / kM * Tile::kRowTable;
    for (int m = w.m_begin; m < m_end; ++m) {
      float u[kRows];
      if (m >= m_near) {
        const float* of_tile = table + int64_t{m} * Tile::kRowTable;
        const float shift =
            pair_difference(*reinterpret_cast<const float2*>(of_tile + Tile::kRowTable - 4), before) - rest;
#pragma unroll
        for (int e = 0; e < kRows; ++e) u[e] = row_bias<Tile::kBiasByMma>(of_tile, e * 32 + lane, a.sigma) + shift;
      }
      ptx::mbarrier_wait(&smem.q_empty[q.slot], q.parity ^ 1);
      if (m >= m_near) {
#pragma unroll
        for (int e = 0; e < kRows; ++e) smem.far_rows[q.slot][e * 32 + lane] = u[e];
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.q_full[q.slot]);
      q.advance();
    }
  }
}

// --------------------------------------------------------------------------------------------- gradients to memory
/// Until key blocks above `n` have added their share of this tile (deterministic mode).
__device__ __forceinline__ void wait_turn(const int* turn, int mine) {
  int now;
  do {
    asm volatile("ld.global.acquire.gpu.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now != mine);
}
__device__ __forceinline__ void pass_turn(int* turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn) : "memory");
}

/// The warp that adds finished dQ tiles and row residuals to global memory, then sends dV and dK.
template <typename Tile, bool kGate>
__device__ __forceinline__ void backward_send(const BackwardArgs& a, const BackwardWork& w,
                                              typename Tile::Shared& smem) {
  constexpr int kPart0 = Tile::kDqPart0;
  constexpr int kPart1 = Tile::kM * Tile::kD - kPart0;
  const int lane = threadIdx.x % 32;
  for (int head = w.kv_head * a.group; head < (w.kv_head + 1) * a.group; ++head) {
    const int m_end = backward_m_end<Tile::kM, Tile::kN>(a, w, head);
    for (int m = w.m_begin; m < m_end; ++m) {
      const int64_t row = table_row(a, w.batch, head) + m * Tile::kM;
      if (lane == 0) ptx::bulk_wait_read<0>();
      __syncwarp();
      ptx::named_barrier_arrive(kBarrierDqEmpty, 160);
      ptx::named_barrier_arrive(kBarrierDqEmpty + 1, 160);
      int* turn = a.dq_turn != nullptr ? a.dq_turn + row / Tile::kM : nullptr;
      if (turn != nullptr) {
        const int last_position = min(m * Tile::kM + Tile::kM, a.query_len) - 1 + a.offset;
        if (lane == 0) wait_turn(turn, last_position / Tile::kN - w.n);
        __syncwarp();
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        ptx::named_barrier_sync(kBarrierDqFull + part, 160);
        if (lane == 0) {
          ptx::bulk_reduce_add_f32(a.dq_sum + row * Tile::kD + part * kPart0, smem.dq + part * kPart0,
                                   (part == 0 ? kPart0 : kPart1) * 4);
          ptx::bulk_commit();
        }
      }
      if (kGate && lane < Tile::kM / kResidualRows) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += smem.residual[8 * lane + i];
        atomicAdd(a.row_residual + row / kResidualRows + lane, sum);
      }
      if (turn != nullptr) {
        if (lane == 0) ptx::bulk_wait<0>();
        __threadfence();
        __syncwarp();
        if (lane == 0) pass_turn(turn);
      }
    }
  }
  // dV, then dK, of each warpgroup, from where it has left them.
#pragma unroll 1
  for (int part = 0; part < 4; ++part) {
    constexpr int kOwnPanels = Tile::kSharedKeys ? Tile::kPanels / 2 : Tile::kPanels;
    ptx::named_barrier_sync(kBarrierKeyGradients + part, 160);
    if (lane == 0) {
      const int wg = part % 2, row = Tile::kSharedKeys ? 0 : wg * 64, panel = Tile::kSharedKeys ? wg * kOwnPanels : 0;
      char* from = static_cast<char*>(part < 2 ? static_cast<void*>(smem.v) : Tile::dk_place(smem)) + row * 128;
#pragma unroll
      for (int p = panel; p < panel + kOwnPanels; ++p)
        ptx::tma_store_4d(part < 2 ? &a.map_dv : &a.map_dk, from + p * Tile::kN * 128, p * 64, w.n * Tile::kN + row,
                          w.kv_head, w.batch);
      ptx::bulk_commit();
    }
  }
  if (lane == 0) {
    ptx::bulk_wait_read<0>();
    if (Tile::kSharedKeys) ptx::mbarrier_arrive(&smem.k_empty);
    ptx::mbarrier_arrive(&smem.v_empty);
  }
  __syncwarp();
}

// -------------------------------------------------------------------------------------------------- arithmetic
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}
template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}

/// Operands that are ones where the tensor cores add up, see sums_by_mma(): columns beside a panel of K or Q, for any
/// k16 step, and the side of V of the step that subtracts Δ, (1, 1, 1, 0 ...), with its second half.
template <typename T, bool kUsed>
struct Ones {
  alignas(1024) T panel[16 * 64];
  alignas(128) uint4 rows[64];
  uint4 zeros[64];

  /// Called by all threads of the CTA, which meet before any reads.
  __device__ __forceinline__ void fill() {
    const int x = threadIdx.x;
    const uint32_t pair = ptx::pack2<T>(1.f, 1.f);
    if (x < 128) reinterpret_cast<uint4*>(panel)[x] = {pair, pair, pair, pair};
    if (x < 64) rows[x] = {ptx::kBf16One | ptx::kBf16One << 16, ptx::kBf16One, 0, 0}, zeros[x] = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async();
  }
};
template <typename T>
struct Ones<T, false> {
  __device__ __forceinline__ void fill() {}
};

/// What a masked tile compares with: column x of the tile sees a key of this thread if x >= first, and if the key is
/// not before the row's lower bound.
struct TileMask {
  int first0, first1;
  const int32_t* lower;  // of the tile's row 0; NULL: no bound
  int rows;              // rows of the tile that exist
  int key0;
};

enum class Exponents { kPlain, kAdded, kByMma, kReady };

/// P of columns 8 kFrom .. 8 kTo - 1, packed to 16-bit pairs: ex2(σ s + u) for kPlain, ex2(σ s + u + b) for kAdded,
/// ex2(σ s + b) for kByMma, whose scores have their biases (b is what all of them share), ex2(s) for kReady.
template <typename T, Exponents kKind, bool kMasked, int kFrom, int kTo, int kCount>
__device__ __forceinline__ void probabilities(const float (&s)[kCount], uint32_t (&p)[kCount / 2], const float* u,
                                              float b0, float b1, float sigma, const TileMask& mask) {
#pragma unroll
  for (int g = kFrom; g < kTo; ++g) {
    float t[4] = {s[4 * g], s[4 * g + 1], s[4 * g + 2], s[4 * g + 3]};
    if constexpr (kKind == Exponents::kPlain || kKind == Exponents::kAdded) {
      const float2 row = *reinterpret_cast<const float2*>(u + 8 * g);
      constexpr bool kAdded = kKind == Exponents::kAdded;
      t[0] = fmaf(t[0], sigma, kAdded ? row.x + b0 : row.x);
      t[1] = fmaf(t[1], sigma, kAdded ? row.y + b0 : row.y);
      t[2] = fmaf(t[2], sigma, kAdded ? row.x + b1 : row.x);
      t[3] = fmaf(t[3], sigma, kAdded ? row.y + b1 : row.y);
    } else if constexpr (kKind == Exponents::kByMma) {
#pragma unroll
      for (int e = 0; e < 4; ++e) t[e] = fmaf(t[e], sigma, b0);
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int x = 8 * g + e, column = x + 2 * (threadIdx.x % 4);
        const int lower = mask.lower != nullptr && column < mask.rows ? mask.lower[column] : INT_MIN;
        if (x < mask.first0 || mask.key0 < lower) t[e] = -INFINITY;
        if (x < mask.first1 || mask.key0 + 8 < lower) t[2 + e] = -INFINITY;
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) t[e] = ptx::ex2(t[e]);
    p[2 * g] = ptx::pack2<T, true>(t[0], t[1]);
    p[2 * g + 1] = ptx::pack2<T, true>(t[2], t[3]);
  }
}

/// One step of a butterfly over the warp in which lanes keep half of their values and send the other half away.
template <int kHalf, int kCount>
__device__ __forceinline__ void exchange_halves(float (&v)[kCount], int lane, int bit) {
  const bool upper = lane & bit;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, send, bit);
  }
}

/// Sums over the warp of one value a group of 8 queries: lane l ends with the sum of group l * kGroups / 32.
/// 16 groups cost 16 shuffles, 8 groups 9, 4 groups 6.
template <int kGroups>
__device__ __forceinline__ float transpose_sum(float (&v)[kGroups], int lane) {
  static_assert(kGroups == 4 || kGroups == 8 || kGroups == 16);
  exchange_halves<kGroups / 2>(v, lane, 16);
  exchange_halves<kGroups / 4>(v, lane, 8);
  if constexpr (kGroups >= 8)
    exchange_halves<kGroups / 8>(v, lane, 4);
  else
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], 4);
  if constexpr (kGroups == 16)
    exchange_halves<1>(v, lane, 2);
  else
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], 2);
  return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}

/// dS = P (dP - Δ) as 16-bit pairs (P dP if Δ has been subtracted), if asked for its sums over queries (per key) and
/// over keys and 8 queries (per group). P may be the operand of a WGMMA in flight: both only read it.
template <typename T, bool kSums, bool kSubtract, int kCount>
__device__ __forceinline__ void score_gradient(const float (&dp)[kCount], const uint32_t (&p)[kCount / 2],
                                               uint32_t (&ds)[kCount / 2], const float* delta, float (&column)[2],
                                               float (&group)[kCount / 4]) {
#pragma unroll
  for (int g = 0; g < kCount / 4; ++g) {
    const float2 d = kSubtract ? *reinterpret_cast<const float2*>(delta + 8 * g) : float2{0.f, 0.f};
    const float2 p0 = unpack2<T>(p[2 * g]), p1 = unpack2<T>(p[2 * g + 1]);
    const float e0 = p0.x * (dp[4 * g] - d.x), e1 = p0.y * (dp[4 * g + 1] - d.y);
    const float e2 = p1.x * (dp[4 * g + 2] - d.x), e3 = p1.y * (dp[4 * g + 3] - d.y);
    if (kSums) {
      const float key0 = e0 + e1, key1 = e2 + e3;
      column[0] += key0;
      column[1] += key1;
      group[g] = key0 + key1;
    }
    ds[2 * g] = ptx::pack2<T>(e0, e1);
    ds[2 * g + 1] = ptx::pack2<T>(e2, e3);
  }
}

/// Zeroes the first `low` rows of panels in shared memory. Called by all consumer threads.
template <int kRows, int kPanels>
__device__ __forceinline__ void clear_rows(void* panels, int low) {
#pragma unroll 1
  for (int i = threadIdx.x - 128; i < kPanels * kRows * 8; i += 256)
    if (i / 8 % kRows < low) static_cast<uint4*>(panels)[i] = uint4{0, 0, 0, 0};
  ptx::fence_proxy_async();
  ptx::named_barrier_sync(kBarrierConsumers, 256);
}

// --------------------------------------------------------------------------------------------------- consumers
/// A consumer thread: keys key0 and key0 + 8, and of each tile the columns (queries) from column0 on. A warpgroup has
/// its own 64 keys and all queries of the tile, or (kSharedKeys) all 64 keys and half of the queries.
template <typename T, typename Tile, bool kGate>
struct BackwardScores {
  using Shared = typename Tile::Shared;
  static constexpr int kM = Tile::kM, kN = Tile::kN, kD = Tile::kD;
  static constexpr int kScores = (Tile::kSharedKeys ? kM / 2 : kM) / 2;  // accumulators of S a thread

  const BackwardArgs& a;
  Shared& smem;
  const int wg, warp, lane;  // warpgroup 0 or 1, warp within it
  const int column0;
  ptx::Ring<2> queue;
  ptx::Ring<1> keys;
  BackwardWork w;
  int key0;                                 // the first of this thread's keys
  ptx::Ring<Tile::kQueryStages> q, q_done;  // stage of Q whose S comes next; stage that dK reads
  ptx::Ring<Tile::kGradientStages> d_o;     // stage of dO; dS has as many
  ptx::Ring<2> bias;                        // of the keys
  float b0, b1;                             // those of this thread's, unless the tensor cores add them

  __device__ __forceinline__ BackwardScores(const BackwardArgs& args, Shared& shared, int group)
      : a(args),
        smem(shared),
        wg(group),
        warp(threadIdx.x / 32 % 4),
        lane(threadIdx.x % 32),
        column0(Tile::kSharedKeys ? wg * (kM / 2) : 0) {}

  /// Takes the next block of keys; false if there is none.
  __device__ __forceinline__ bool next() {
    if (!next_work<Tile>(smem, queue, w)) return false;
    key0 = w.n * kN + (Tile::kSharedKeys ? 0 : wg * 64) + warp * 16 + lane / 4;
    return true;
  }

  /// First row of tile m whose scores this warpgroup computes, and its entry of a per-row table of the tile.
  __device__ __forceinline__ int row0(int m) const { return m * kM + column0; }
  __device__ __forceinline__ const float* row_values(const float* table) const {
    return table + column0 + 2 * (lane % 4);
  }

  /// The bias of this warpgroup's keys for the next head, until release_key_bias().
  __device__ __forceinline__ void wait_key_bias() {
    if constexpr (kGate) {
      ptx::mbarrier_wait(&smem.key_bias.full[bias.slot], bias.parity);
      if constexpr (!Tile::kBiasByMma) {
        const float* row = smem.key_bias.row[bias.slot] + (key0 - w.n * kN);
        b0 = row[0], b1 = row[8];
      }
    }
  }
  __device__ __forceinline__ void release_key_bias() {
    if constexpr (kGate) {
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.key_bias.empty[bias.slot]);
      bias.advance();
    }
  }

  /// If the tensor cores add the biases: s = (u_i + b_j) / σ of the tile whose Q is in stage q, or 0. The scores come
  /// next.
  __device__ __forceinline__ void issue_bias(float (&s)[kScores], bool is_zero) {
    if constexpr (Tile::kBiasByMma) {
      const uint32_t zeros = ptx::smem_u32(smem.key_bias.zeros);
      const uint32_t keys =
          is_zero ? zeros : ptx::smem_u32(smem.key_bias.row[bias.slot] + (Tile::kSharedKeys ? 0 : wg * 64));
      const uint32_t rows = ptx::smem_u32(smem.row_bias[q.slot]) + column0 * 16;
      ptx::Wgmma<__nv_bfloat16, 2 * kScores>::template ss<>(s, ptx::descriptor_narrow(keys, zeros - keys),
                                                            ptx::descriptor_narrow(rows, 0), false);
    }
  }

  // Left padding may hold NaN, and 0·NaN would leak into the products: its rows are zeroed after the load. Only a
  // head's first tile can have any (kMayPad).
  template <bool kMayPad = true>
  __device__ __forceinline__ void wait_q(int m) {
    ptx::mbarrier_wait(&smem.q_full[q.slot], q.parity);
    if constexpr (!kMayPad) return;
    if (m * kM < w.query_low) clear_rows<kM, Tile::kPanels>(smem.q[q.slot], w.query_low - m * kM);
  }
  template <bool kMayPad = true>
  __device__ __forceinline__ void wait_do(int m) {
    ptx::mbarrier_wait(&smem.do_full[d_o.slot], d_o.parity);
    if constexpr (!kMayPad) return;
    if (m * kM < w.query_low) clear_rows<kM, Tile::kPanels>(smem.d_o[d_o.slot], w.query_low - m * kM);
  }
  /// K and V, once a block. V comes when the last block's dV and dK have been read from their places, so these are free
  /// now.
  __device__ __forceinline__ void wait_keys() {
    ptx::mbarrier_wait(&smem.k_full, keys.parity);
    ptx::mbarrier_wait(&smem.v_full, keys.parity);
    keys.advance();
    if (w.n * kN < w.key_low) {
      clear_rows<kN, Tile::kPanels>(smem.k, w.key_low - w.n * kN);
      clear_rows<kN, Tile::kPanels>(smem.v, w.key_low - w.n * kN);
    }
  }

  /// Whether tile m needs its entries compared with the mask.
  __device__ __forceinline__ bool on_diagonal(int m) const { return m * kM + a.offset < w.n * kN + kN - 1; }
  __device__ __forceinline__ bool is_masked(int m) const {
    return on_diagonal(m) || w.n * kN < w.key_low || w.n * kN + kN > a.key_len || m * kM + kM > w.lower_row;
  }
  /// Tiles that need none, between the diagonal and the first that the window or a document's start cuts.
  __device__ __forceinline__ int plain_begin() const {
    if (w.n * kN < w.key_low || w.n * kN + kN > a.key_len) return INT_MAX;
    return max(0, w.n * kN + kN - 1 - a.offset + kM - 1) / kM;
  }
  __device__ __forceinline__ int plain_end() const { return w.lower_row / kM; }
  __device__ __forceinline__ TileMask tile_mask(int m) const {
    const auto first = [&](int j) {
      return j < w.key_low || j >= a.key_len ? INT_MAX : j - a.offset - row0(m) - 2 * (lane % 4);
    };
    const bool bounded = m * kM + kM > w.lower_row;
    return {first(key0), first(key0 + 8), bounded ? a.prefix.lower + int64_t{w.batch} * a.query_len + row0(m) : nullptr,
            a.query_len - row0(m), key0};
  }

  /// Rare: c falls so far inside the diagonal block that u_i + b_j would cancel.
  __device__ __forceinline__ bool is_steep(int m) const {
    return kGate && on_diagonal(m) &&
           (smem.key_bias.range[bias.slot] > kPreciseRange || fabsf(tile_shift()) > kPreciseRange);
  }
  /// Turns the scores of such a tile, without bias, into the exponents.
  __device__ __forceinline__ void precise_exponents(float (&s)[kScores], int m, int head) const {
    const GatePrefix prefix(a, w.batch, head);
    const float* lse = a.lse + (int64_t{w.batch} * a.heads + head) * a.query_len;
    const double c0 = prefix(min(key0, a.key_len - 1)), c1 = prefix(min(key0 + 8, a.key_len - 1));
#pragma unroll
    for (int g = 0; g < kScores / 4; ++g)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = row0(m) + 8 * g + 2 * (lane % 4) + e;
        const bool is_valid = i >= w.query_low && i < a.query_len;
        const double c = is_valid ? prefix(i + a.offset) : 0.;
        const float minus_lse = is_valid && lse[i] != -INFINITY ? -lse[i] * float(kLog2e) : -INFINITY;
        s[4 * g + e] = fmaf(s[4 * g + e], a.sigma, static_cast<float>(c - c0) + minus_lse);
        s[4 * g + 2 + e] = fmaf(s[4 * g + 2 + e], a.sigma, static_cast<float>(c - c1) + minus_lse);
      }
  }

  /// (cref_m - cref_n)·log2e of the tile whose Q is in stage q.
  __device__ __forceinline__ float tile_shift() const {
    if constexpr (!kGate) return 0.f;
    return pair_difference(*reinterpret_cast<const float2*>(&smem.row_bias[q.slot][Tile::kRowTable - 4]),
                           smem.key_bias.reference[bias.slot]);
  }

  static constexpr Exponents kExponents = Tile::kBiasByMma ? Exponents::kByMma
                                          : kGate          ? Exponents::kAdded
                                                           : Exponents::kPlain;
  __device__ __forceinline__ float bias0(float shift) const {
    return kExponents == Exponents::kAdded ? b0 + shift : shift;
  }
  __device__ __forceinline__ float bias1(float shift) const {
    return kExponents == Exponents::kAdded ? b1 + shift : shift;
  }

  /// P of part of a tile that needs no mask.
  template <int kFrom, int kTo, bool kFar = false>
  __device__ __forceinline__ void make_p(const float (&s)[kScores], uint32_t (&p)[kScores / 2], float shift) {
    if constexpr (kFar)
      probabilities<T, Exponents::kPlain, false, kFrom, kTo>(s, p, row_values(smem.far_rows[q.slot]), 0.f, 0.f, a.sigma,
                                                             TileMask{});
    else
      probabilities<T, kExponents, false, kFrom, kTo>(s, p, row_values(smem.row_bias[q.slot]), bias0(shift),
                                                      bias1(shift), a.sigma, TileMask{});
  }

  /// P of all of tile m, which may need a mask.
  __device__ __forceinline__ void make_masked_p(float (&s)[kScores], uint32_t (&p)[kScores / 2], int m, int head) {
    const float shift = tile_shift();
    const float* u = row_values(smem.row_bias[q.slot]);
    if (!is_masked(m)) {
      make_p<0, kScores / 4>(s, p, shift);
    } else if (is_steep(m)) {
      precise_exponents(s, m, head);
      probabilities<T, Exponents::kReady, true, 0, kScores / 4>(s, p, u, 0.f, 0.f, 0.f, tile_mask(m));
    } else {
      probabilities<T, kExponents, true, 0, kScores / 4>(s, p, u, bias0(shift), bias1(shift), a.sigma, tile_mask(m));
    }
  }

  /// dQ as it lies in registers, 16 bytes a thread (the reduction is flat and the last kernel knows the order), and
  /// row sums of dS: the warp's over groups of 8 queries, or with kWithSums those that lie behind dQ. The place must be
  /// empty.
  template <bool kWithSums = true, int kSize>
  __device__ __forceinline__ void store_dq(const float (&dq)[kSize], float residual) {
    constexpr int kCount = kSize - Tile::kOnes / 2;
    constexpr int kLanes = 32 / (kScores / 4);  // lanes that hold one group of 8 queries
    float4* out = reinterpret_cast<float4*>(smem.dq + wg * Tile::kDqPart0) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
      out[i * 128] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    if constexpr (Tile::kOnes > 0) {
      const int row = wg * 64 + warp * 16 + lane / 4;
      float sum[2] = {0.f, 0.f};
      if constexpr (kWithSums) sum[0] = dq[kCount], sum[1] = dq[kCount + 2];
      if (lane % 4 == 0) smem.residual[row] = sum[0], smem.residual[row + 8] = sum[1];
    } else if (kGate && lane % kLanes == 0) {
      smem.residual[(column0 / 8 + lane / kLanes) * 8 + wg * 4 + warp] = residual;
    }
  }
  __device__ __forceinline__ void send_dq() {
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive(kBarrierDqFull + wg, 160);
  }

  /// Leaves this warpgroup's part of dV or dK, the first kCount of acc, for the warp that sends it.
  template <int kCount, int kSize>
  __device__ __forceinline__ void send_key_gradient(const float (&acc)[kSize], float factor, void* panels,
                                                    int barrier) {
    constexpr int kChunks = kCount / 4;                            // of 8 columns
    const int first_chunk = Tile::kSharedKeys ? wg * kChunks : 0;  // a whole number of panels
    const uint32_t base = ptx::smem_u32(panels) + first_chunk / 8 * kN * 128;
    const int row = (Tile::kSharedKeys ? 0 : wg * 64) + warp * 16 + lane % 16;
    const bool is_padding[2] = {key0 < w.key_low, key0 + 8 < w.key_low};
#pragma unroll
    for (int g = 0; g < kChunks; g += 2) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        r[i] = is_padding[i % 2] ? 0 : ptx::pack2<T>(acc[4 * g + 2 * i] * factor, acc[4 * g + 2 * i + 1] * factor);
      ptx::stmatrix_x4(base + g / 8 * kN * 128 + ptx::swizzle128(row, g % 8 + lane / 16), r[0], r[1], r[2], r[3]);
    }
    ptx::fence_proxy_async();
    ptx::named_barrier_arrive(barrier + wg, 160);
  }

  /// Σ of `column` over the four lanes that share a key, for both keys.
  __device__ __forceinline__ static void sum_columns(float (&column)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      column[e] += __shfl_xor_sync(0xffffffffu, column[e], 1);
      column[e] += __shfl_xor_sync(0xffffffffu, column[e], 2);
    }
  }
  __device__ __forceinline__ void store_column(float sum, int key, int head) const {
    if (lane % 4 == 0 && key < a.key_len) a.column_sum[(int64_t{w.batch} * a.heads + head) * a.key_len + key] = sum;
  }
};

template <typename Consumer>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    forgetting_attn_bwd_kernel(const __grid_constant__ BackwardArgs a) {
  using Tile = typename Consumer::Layout;
  extern __shared__ __align__(1024) char raw[];
  auto& smem = *reinterpret_cast<typename Tile::Shared*>(raw);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  ptx::start_next_kernel();
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&a.map_q, &a.map_k, &a.map_v, &a.map_do, &a.map_dk, &a.map_dv})
      ptx::prefetch_tensor_map(map);
    constexpr int kWarps = 8;  // of consumers; each arrives once
    ptx::mbarrier_init(&smem.k_full, 1), ptx::mbarrier_init(&smem.k_empty, Tile::kSharedKeys ? 1 : kWarps);
    ptx::mbarrier_init(&smem.v_full, 1), ptx::mbarrier_init(&smem.v_empty, 1);
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&smem.key_bias.full[i], 1), ptx::mbarrier_init(&smem.key_bias.empty[i], kWarps);
      ptx::mbarrier_init(&smem.queue.full[i], 1);
      ptx::mbarrier_init(&smem.queue.empty[i], kWarps + 1 + Tile::kFarLoop + Consumer::kHasGate);
    }
    for (int i = 0; i < Tile::kQueryStages; ++i) {
      ptx::mbarrier_init(&smem.q_full[i], Tile::kFarLoop ? 2 : 1);
      ptx::mbarrier_init(&smem.q_empty[i], kWarps);
    }
    for (int i = 0; i < Tile::kGradientStages; ++i) {
      ptx::mbarrier_init(&smem.do_full[i], 1);
      ptx::mbarrier_init(&smem.do_empty[i], kWarps);
    }
    ptx::fence_barrier_init();
  }
  smem.ones.fill();
  if constexpr (Tile::kBiasByMma) {
    if (threadIdx.x < 64) smem.key_bias.zeros[threadIdx.x] = uint4{0, 0, 0, 0};
    ptx::fence_proxy_async();
  }
  __syncthreads();
  ptx::wait_for_previous_kernel();
  if (warp < 4) {
    ptx::setmaxnreg_dec<24>();
    ptx::Ring<2> queue;
    BackwardWork w;
    if (warp == 0 && ptx::elect_one()) BackwardLoader<Tile>{a, smem}.run();
    if (warp == 1)
      while (next_work<Tile>(smem, queue, w)) backward_send<Tile, Consumer::kHasGate>(a, w, smem);
    if constexpr (Tile::kFarLoop)
      if (warp == 2) {
        ptx::Ring<Tile::kQueryStages> q;
        while (next_work<Tile>(smem, queue, w)) backward_far_rows<Tile>(a, w, smem, q);
      }
    if constexpr (Consumer::kHasGate)
      if (warp == 3) {
        ptx::Ring<2> ring;
        while (next_work<Tile>(smem, queue, w)) backward_key_bias<Tile>(a, w, smem, ring);
      }
  } else {
    ptx::setmaxnreg_inc<240>();
    Consumer(a, smem, warp / 4 - 1).run();
  }
}

template <typename Consumer>
cudaError_t launch_backward_kernel(const BackwardArgs& a, cudaStream_t stream) {
  using Tile = typename Consumer::Layout;
  constexpr int kBytes = sizeof(typename Tile::Shared);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = forgetting_attn_bwd_kernel<Consumer>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{(a.key_len + Tile::kN - 1) / Tile::kN} * a.batch * a.kv_heads;
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(blocks, a.multiprocessors));
  return launch_early(kernel, ctas, kBackwardThreads, kBytes, stream, a);
}

}  // namespace fox::cuda
