// Decoding: bound by the memory's speed, so everything serves keeping loads in flight and reading only what matters.
//
// A plan kernel finds for each (sequence, KV head) the first key block that some of its queries need; what is left is a
// list of units of 64 keys. A persistent kernel cuts that list into as many equal shares as it has thread blocks, so
// that sequences and heads of very different length fill the machine evenly and to the end (a head counts for some
// units more than it has, the price of its start: short ones come many to a share); a last kernel combines the pieces
// of a head that lie in different shares by their log-sum-exps. Within a share each of four warps streams every fourth
// unit through its own ring of cp.async stages, without meeting the others before the head's end. The queries of a KV
// head's group, padded to 16 rows, are the A operand of mma.m16n8k16.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/forgetting_attn_prefix.h"
#include "kernels/cuda/forgetting_decode.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"

namespace fox::cuda {
namespace {

constexpr int kWarps = 4, kTileKeys = 16, kUnitKeys = kBiasBlock, kUnitTiles = kUnitKeys / kTileKeys, kRows = 16;
constexpr int kMostBlocks = 4;  // a multiprocessor
constexpr int kStartUnits = 5;  // the price of a head's start

struct DecodeArgs {
  ForgettingDecodeParams p;
  int32_t rows, row_blocks;
  int32_t workers;      // thread blocks of the main kernel
  int32_t block_heads;  // at most so many heads in a block of 16 rows
  int32_t* begin;       // (batch * kv_heads): first key kept, a multiple of 64
  int32_t* offset;      // (batch * kv_heads + 1): number of units before each, with kStartUnits for each that has any
  float* partial_o;     // (pieces, 16, head_dim)
  float2* partial_ml;   // (pieces, 16): maximum and sum, in log2 units
};

/// Shares of the list, whose length counts each unit once a block of rows. None is empty.
struct Shares {
  int64_t units, count;
  __device__ __forceinline__ explicit Shares(const DecodeArgs& a)
      : units(int64_t{a.offset[a.p.batch * a.p.kv_heads]} * a.row_blocks), count(min(int64_t{a.workers}, units)) {}
  __device__ __forceinline__ int64_t first_unit(int64_t share) const { return share * units / count; }
  __device__ __forceinline__ int64_t share_of(int64_t unit) const { return ((unit + 1) * count - 1) / units; }
};
/// Where the part of a head (and block of rows) in a share goes: walking along the list one or the other grows.
__device__ __forceinline__ int64_t piece_of(const DecodeArgs& a, int64_t share, int item, int row_block) {
  return share + int64_t{item} * a.row_blocks + row_block;
}

// ----------------------------------------------------------------------------------------------------------- plan

/// The lanes that search for one head, a power of two of them side by side in a warp.
struct SearchLanes {
  int count, own;  // lanes, and which of them this thread is
  uint32_t mask;   // of the warp
  __device__ __forceinline__ explicit SearchLanes(int lanes)
      : count(lanes),
        own(threadIdx.x % lanes),
        mask((lanes == 32 ? ~0u : (1u << lanes) - 1) << threadIdx.x % 32 / lanes * lanes) {}
  /// First index from `low` on for which `holds`, which is monotone and holds at `high`. All lanes look at once and
  /// leave a part in count + 1 of the range: what takes time is the loads that wait for each other.
  template <typename Holds>
  __device__ __forceinline__ int first(int low, int high, const Holds& holds) const {
    while (low < high) {
      const int step = (high - low + count) / (count + 1), probe = low + (own + 1) * step - 1;
      const uint32_t found = __ballot_sync(mask, probe >= high || holds(probe)) & mask;
      const int before =
          found ? __ffs(found) - 1 - (threadIdx.x % 32 - own) : count;  // lanes that it does not hold for
      if (found) high = min(high, low + (before + 1) * step - 1);
      low += before * step;
    }
    return high;
  }
};

/// First key that query head h of sequence b needs.
__device__ int first_needed_key(const ForgettingDecodeParams& p, int b, int h, int key_len, const SearchLanes& lanes) {
  const int position = max(0, key_len - p.query_len);  // of the first query, which reaches back furthest
  int first = p.window > 0 ? max(0, position - p.window + 1) : 0;
  if (p.pruned && p.prefix.r) {
    const int64_t row = int64_t(b) * p.query_heads + h;
    const float2* block = reinterpret_cast<const float2*>(p.prefix.block) + row * p.prefix.max_blocks;
    const float r = p.prefix.r[row * p.prefix.max_blocks * kBiasBlock + position];
    // By the number of keys: the cache has no sums of decays, by which forward and backward prune more.
    const float threshold = (-2 * p.logit_bound[h] - logf(float(key_len)) + p.log_tolerance) * float(kLog2e);
    const int last = position / kBiasBlock;
    const float2 own = block[last];
    const int kept = lanes.first(0, last, [&](int n) { return pair_difference(own, block[n + 1]) + r >= threshold; });
    first = max(first, kept * kBiasBlock);
  }
  return first / kBiasBlock * kBiasBlock;
}

__global__ void __launch_bounds__(1024) decode_plan_kernel(const __grid_constant__ DecodeArgs a) {
  __shared__ int warp_total[32];
  __shared__ int carry;
  ptx::start_next_kernel();
  if (threadIdx.x == 0) carry = 0;
  const int items = a.p.batch * a.p.kv_heads, group = a.p.query_heads / a.p.kv_heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int per_item = 32;
  while (per_item > 1 && items * per_item > 1024) per_item /= 2;
  const SearchLanes lanes(per_item);
  ptx::wait_for_previous_kernel();
  for (int base = 0; base < items; base += 1024 / per_item) {
    const int item = base + threadIdx.x / per_item;
    int units = 0;
    if (item < items) {
      const int b = item / a.p.kv_heads, key_len = a.p.key_len[b];
      int begin = key_len;
      for (int g = 0; g < group && key_len > 0; ++g)
        begin = min(begin, first_needed_key(a.p, b, item % a.p.kv_heads * group + g, key_len, lanes));
      if (lanes.own == 0) {
        a.begin[item] = begin;
        units = (key_len - begin + kUnitKeys - 1) / kUnitKeys;
        if (units > 0) units += kStartUnits;
      }
    }
    int sum = units;
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += left;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    int before = carry;
    for (int w = 0; w < warp; ++w) before += warp_total[w];
    if (item < items && lanes.own == 0) a.offset[item] = before + sum - units;
    __syncthreads();
    if (threadIdx.x == 1023) carry = before + sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) a.offset[items] = carry;
}

/// Byte offset of a 16-byte chunk of a row in a panel of 128-byte rows, so that 8 rows of one chunk meet 8 bank groups.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk) {
  return row * 128 + ((chunk ^ row % 8) << 4);
}

// ----------------------------------------------------------------------------------------------------------- main

template <typename T, int kD>
struct DecodeWarp {
  static constexpr int kStages = kD <= 64 ? 4 : kD <= 128 ? 3 : 2;
  static constexpr int kPanels = kD / 64, kPanelBytes = kTileKeys * 128, kTileBytes = kPanels * kPanelBytes;
  static constexpr int kStageBytes = 2 * kTileBytes;  // K tile, V tile
  /// Behind the stages for two units and each head of the row block: r of the unit's keys, its prefix pair, 8 bytes of
  /// padding.
  static constexpr int kHeadPrefixBytes = kUnitKeys * 4 + 16;
  __host__ __device__ static constexpr int warp_bytes(int heads) {
    return kStages * kStageBytes + (2 * heads * kHeadPrefixBytes + 127) / 128 * 128;
  }
  static_assert(kStages - 1 <= kUnitTiles, "tiles under way belong to at most two units");

  const DecodeArgs& a;
  const uint32_t ring;  // shared address of this warp's stages
  const int warp, lane;
  int item, b, kv_head, key_len, row_block;
  bool two_rows;               // whether some query is in rows 8 to 15
  int first_head, heads;       // of the row block
  int first_key, tiles;        // of the piece; this warp's tiles
  float2 row_block_prefix[2];  // prefix pair of the block of this thread's rows
  float row_r[2];
  int row_head[2], row_position[2];  // position < 0: padding
  uint32_t q[kD / 16][4];
  float o[kD / 8][4], top[2], sum[2];

  __device__ __forceinline__ int row_index(int row) const { return row_block * kRows + lane / 4 + 8 * row; }

  __device__ __forceinline__ void begin_piece() {
    const auto& p = a.p;
    const int group = p.query_heads / p.kv_heads, last_row = min(row_block * kRows + kRows, a.rows) - 1;
    two_rows = last_row - row_block * kRows >= 8;
    first_head = kv_head * group + row_block * kRows / p.query_len;
    heads = kv_head * group + last_row / p.query_len - first_head + 1;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int index = row_index(row);
      const bool valid = index < a.rows;
      row_head[row] = valid ? kv_head * group + index / p.query_len : first_head;
      row_position[row] = valid ? key_len - p.query_len + index % p.query_len : -1;
      const int position = max(0, row_position[row]);
      const T* from = static_cast<const T*>(p.q.data) + b * p.q.stride_b +
                      (valid ? index % p.query_len : 0) * p.q.stride_t + row_head[row] * p.q.stride_h;
#pragma unroll
      for (int i = 0; i < kD / 8; ++i) {
        const int d = 8 * i + lane % 4 * 2;
        q[i / 2][i % 2 * 2 + row] = valid && d < p.head_dim ? *reinterpret_cast<const uint32_t*>(from + d) : 0;
      }
      if (p.prefix.r) {
        const int64_t head_row = int64_t(b) * p.query_heads + row_head[row];
        row_r[row] = p.prefix.r[head_row * p.prefix.max_blocks * kBiasBlock + position];
        row_block_prefix[row] =
            reinterpret_cast<const float2*>(p.prefix.block)[head_row * p.prefix.max_blocks + position / kBiasBlock];
      }
      top[row] = -INFINITY, sum[row] = 0;
    }
#pragma unroll
    for (int i = 0; i < kD / 8; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = 0;
  }

  __device__ __forceinline__ int key_of_tile(int tile) const {
    return first_key + (warp + tile / kUnitTiles * kWarps) * kUnitKeys + tile % kUnitTiles * kTileKeys;
  }
  /// Where the prefixes of a tile's unit lie.
  __device__ __forceinline__ uint32_t prefix_of_tile(int tile) const {
    return ring + kStages * kStageBytes + tile / kUnitTiles % 2 * heads * kHeadPrefixBytes;
  }

  __device__ __forceinline__ void load_tile(int stage, int tile) {
    const auto& p = a.p;
    const uint32_t to = ring + stage * kStageBytes;
    const int key0 = key_of_tile(tile), end = key_len;
    if (tile < tiles && key0 < end) {
      int64_t k_at, v_at;
      if (p.block_table) {
        const int64_t page = p.block_table[int64_t(item) * p.max_pages + key0 / kBiasBlock];
        k_at = page * p.k.stride_b + key0 % kBiasBlock * p.k.stride_t;
        v_at = page * p.v.stride_b + key0 % kBiasBlock * p.v.stride_t;
      } else {
        k_at = b * p.k.stride_b + key0 * p.k.stride_t + kv_head * p.k.stride_h;
        v_at = b * p.v.stride_b + key0 * p.v.stride_t + kv_head * p.v.stride_h;
      }
      const T* k = static_cast<const T*>(p.k.data) + k_at;
      const T* v = static_cast<const T*>(p.v.data) + v_at;
#pragma unroll
      for (int i = lane; i < kTileKeys * kD / 8; i += 32) {
        const int row = i / (kD / 8), chunk = i % (kD / 8);
        const bool valid = key0 + row < end && chunk * 8 < p.head_dim;
        const uint32_t at = to + chunk / 8 * kPanelBytes + swizzled(row, chunk % 8);
        ptx::copy_async_16(at, k + (valid ? row * p.k.stride_t + chunk * 8 : 0), valid);
        ptx::copy_async_16(at + kTileBytes, v + (valid ? row * p.v.stride_t + chunk * 8 : 0), valid);
      }
      if (p.prefix.r && tile % kUnitTiles == 0) load_prefix(prefix_of_tile(tile), key0);
    }
    ptx::copy_async_commit();
  }

  /// The prefixes of a whole unit: long rows, which the memory likes better than a piece beside each tile.
  __device__ __forceinline__ void load_prefix(uint32_t to, int key0) {
    constexpr int kPieces = kUnitKeys / 4;  // of 16 bytes
    const auto& c = a.p.prefix;
    const int64_t first_row = (int64_t(b) * a.p.query_heads + first_head) * c.max_blocks + key0 / kUnitKeys;
    for (int i = lane; i < heads * kPieces; i += 32)
      ptx::copy_async_16(to + i / kPieces * kHeadPrefixBytes + i % kPieces * 16,
                         c.r + (first_row + i / kPieces * c.max_blocks) * kUnitKeys + i % kPieces * 4, true);
    for (int i = lane; i < heads; i += 32)
      ptx::copy_async_8(to + i * kHeadPrefixBytes + kUnitKeys * 4,
                        reinterpret_cast<const float2*>(c.block) + first_row + i * c.max_blocks);
  }

  /// D_ij of this thread's two rows and the keys 2 (lane % 4) + {0, 1, 8, 9} of a tile, in log2 units.
  __device__ __forceinline__ void bias_of_tile(float (&bias)[2][4], int tile) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (row == 1 && !two_rows) break;
      const uint32_t from = prefix_of_tile(tile) + (row_head[row] - first_head) * kHeadPrefixBytes;
      const uint32_t keys = from + tile % kUnitTiles * (kTileKeys * 4) + lane % 4 * 8;
      const float2 near = ptx::lds64(keys), far = ptx::lds64(keys + 32);
      const float from_row = pair_difference(row_block_prefix[row], ptx::lds64(from + kUnitKeys * 4));
      bias[row][0] = from_row + (row_r[row] - near.x), bias[row][1] = from_row + (row_r[row] - near.y);
      bias[row][2] = from_row + (row_r[row] - far.x), bias[row][3] = from_row + (row_r[row] - far.y);
    }
  }

  __device__ __forceinline__ void process_tile(int stage, int tile, float scale_log2) {
    const uint32_t k_tile = ring + stage * kStageBytes, v_tile = k_tile + kTileBytes;
    float s[2][4] = {}, bias[2][4] = {};
    if (a.p.prefix.r) bias_of_tile(bias, tile);
    const uint32_t k_row = lane / 16 * 8 + lane % 8, v_row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      uint32_t r[4];
      ptx::ldmatrix_x4(r, k_tile + step / 4 * kPanelBytes + swizzled(k_row, step % 4 * 2 + lane / 8 % 2));
      ptx::mma<T>(s[0], q[step], r[0], r[1]);
      ptx::mma<T>(s[1], q[step], r[2], r[3]);
    }
    softmax(s, key_of_tile(tile), bias, scale_log2);
    const uint32_t p[4] = {ptx::pack2<T>(s[0][0], s[0][1]), ptx::pack2<T>(s[0][2], s[0][3]),
                           ptx::pack2<T>(s[1][0], s[1][1]), ptx::pack2<T>(s[1][2], s[1][3])};
#pragma unroll
    for (int i = 0; i < kD / 16; ++i) {
      uint32_t r[4];
      ptx::ldmatrix_x4_trans(r, v_tile + i / 4 * kPanelBytes + swizzled(v_row, i % 4 * 2 + lane / 16));
      ptx::mma<T>(o[2 * i], p, r[0], r[1]);
      ptx::mma<T>(o[2 * i + 1], p, r[2], r[3]);
    }
  }

  /// Scores s[key group][2 * row + key] to weights; rescales o when a row's maximum grows. Rows 8 to 15 hold zeros
  /// where there are no so many queries, and stay as they are.
  __device__ __forceinline__ void softmax(float (&s)[2][4], int key0, const float (&bias)[2][4], float scale_log2) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (row == 1 && !two_rows) break;
      const int last = row_position[row], first = a.p.window > 0 ? last - a.p.window + 1 : 0;
      float highest = top[row];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key0 + lane % 4 * 2 + e / 2 * 8 + e % 2;
        float& t = s[e / 2][2 * row + e % 2];
        t = key > last || key < first ? -INFINITY : fmaf(t, scale_log2, bias[row][e]);
        highest = fmaxf(highest, t);
      }
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, 2));
      const float base = highest == -INFINITY ? 0.f : highest;
      const float alpha = ptx::ex2(top[row] - base);
      top[row] = highest;
      sum[row] *= alpha;
      if (__any_sync(0xffffffff, alpha != 1.f)) {
#pragma unroll
        for (int i = 0; i < kD / 8; ++i) o[i][2 * row] *= alpha, o[i][2 * row + 1] *= alpha;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& t = s[e / 2][2 * row + e % 2];
        t = ptx::ex2(t - base);
        sum[row] += t;
      }
    }
  }

  /// This warp's share of `units` units from key `first` on.
  __device__ __forceinline__ void run(int first, int units) {
    const float scale_log2 = a.p.scale * float(kLog2e);
    first_key = first;
    tiles = (units - warp + kWarps - 1) / kWarps * kUnitTiles;
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) load_tile(i, i);
    int stage = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      ptx::copy_async_wait<kStages - 2>();
      __syncwarp();
      load_tile((stage + kStages - 1) % kStages, tile + kStages - 1);
      if (key_of_tile(tile) < key_len) process_tile(stage, tile, scale_log2);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    ptx::copy_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(0xffffffff, sum[row], 1);
      sum[row] += __shfl_xor_sync(0xffffffff, sum[row], 2);
    }
  }
};

/// What four warps made of a piece, added up and written to its place. All threads of the block; `smem` is free.
template <typename T, int kD>
__device__ __forceinline__ void store_piece(const DecodeArgs& a, const DecodeWarp<T, kD>& w, int64_t piece,
                                            char* smem) {
  __shared__ float2 shared_ml[kWarps][kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane % 4 == 0) {
    shared_ml[warp][lane / 4] = {w.top[0], w.sum[0]};
    shared_ml[warp][lane / 4 + 8] = {w.top[1], w.sum[1]};
  }
  __syncthreads();  // the rings are drained: their place takes O of all warps
  const auto highest_of = [&](int r) {
    float highest = -INFINITY;
    for (int i = 0; i < kWarps; ++i) highest = fmaxf(highest, shared_ml[i][r].x);
    return highest;
  };
  const auto weight = [](float top, float highest) { return ptx::ex2(top - (highest == -INFINITY ? 0.f : highest)); };
  float* shared_o = reinterpret_cast<float*>(smem);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int r = lane / 4 + 8 * row;
    const float factor = weight(w.top[row], highest_of(r));
#pragma unroll
    for (int i = 0; i < kD / 8; ++i)
      *reinterpret_cast<float2*>(shared_o + (warp * kRows + r) * (kD + 8) + 8 * i + lane % 4 * 2) = {
          w.o[i][2 * row] * factor, w.o[i][2 * row + 1] * factor};
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kD; i += kWarps * 32) {
    const int r = i / kD, d = i % kD;
    if (w.row_block * kRows + r >= a.rows || d >= a.p.head_dim) continue;
    float value = 0;
    for (int j = 0; j < kWarps; ++j) value += shared_o[(j * kRows + r) * (kD + 8) + d];
    a.partial_o[(piece * kRows + r) * a.p.head_dim + d] = value;
    if (d == 0) {
      const float highest = highest_of(r);
      float sum = 0;
      for (int j = 0; j < kWarps; ++j) sum += shared_ml[j][r].y * weight(shared_ml[j][r].x, highest);
      a.partial_ml[piece * kRows + r] = {highest, sum};
    }
  }
  __syncthreads();
}

template <typename T, int kD>
__global__ void __launch_bounds__(kWarps * 32, kD <= 128 ? 3 : 1) decode_kernel(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) char smem[];
  const int warp = threadIdx.x / 32;
  using Warp = DecodeWarp<T, kD>;
  ptx::start_next_kernel();
  ptx::wait_for_previous_kernel();
  const int items = a.p.batch * a.p.kv_heads;
  const Shares shares(a);
  if (blockIdx.x >= shares.count) return;
  Warp w{a, ptx::smem_u32(smem) + warp * Warp::warp_bytes(a.block_heads), warp, int(threadIdx.x % 32)};
  const int64_t end = shares.first_unit(blockIdx.x + 1);
  int64_t unit = shares.first_unit(blockIdx.x);
  int started = 0;  // items that start at or before the unit
  for (int i = w.lane; i < items; i += 32) started += int64_t{a.offset[i]} * a.row_blocks <= unit;
  int item = __reduce_add_sync(0xffffffff, started) - 1;
  for (int64_t next; unit < end; unit = next) {
    while (int64_t{a.offset[item + 1]} * a.row_blocks <= unit) ++item;
    const int own = a.offset[item + 1] - a.offset[item];
    const int inside = int(unit - int64_t{a.offset[item]} * a.row_blocks), from = inside % own;
    next = min(end, unit - from + own);
    const int first = max(from - kStartUnits, 0), count = from + int(next - unit) - kStartUnits - first;
    if (count <= 0) continue;
    w.item = item, w.b = item / a.p.kv_heads, w.kv_head = item % a.p.kv_heads;
    w.key_len = a.p.key_len[w.b], w.row_block = inside / own;
    const int begin = a.begin[item];
    w.begin_piece();
    w.run(begin + first * kUnitKeys, count);
    store_piece(a, w, piece_of(a, blockIdx.x, item, w.row_block), smem);
  }
}

/// One block a (row, KV head, sequence). Groups of threads, one a column of O, share the pieces out among themselves.
constexpr int kCombineThreads = 256;
template <typename T>
__global__ void __launch_bounds__(kCombineThreads)
    decode_combine_kernel(const __grid_constant__ DecodeArgs a, int columns) {
  __shared__ float sums[kCombineThreads];
  const auto& p = a.p;
  const int item = blockIdx.x, index = blockIdx.y, tid = threadIdx.x;
  ptx::wait_for_previous_kernel();
  const int row_block = index / kRows, units = a.offset[item + 1] - a.offset[item];
  int first = 0, end = 0;  // shares
  if (units > 0) {
    const Shares shares(a);
    const int64_t unit = int64_t{a.offset[item]} * a.row_blocks + int64_t{row_block} * units;
    first = int(shares.share_of(unit + kStartUnits)), end = int(shares.share_of(unit + units - 1)) + 1;
  }
  const auto slot = [&](int share) { return piece_of(a, share, item, row_block) * kRows + index % kRows; };
  // Every warp finds maximum and sum by itself.
  float highest = -INFINITY, sum = 0;
#pragma unroll 4
  for (int c = first + tid % 32; c < end; c += 32) highest = fmaxf(highest, a.partial_ml[slot(c)].x);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(0xffffffff, highest, step));
  const float base = highest == -INFINITY ? 0.f : highest;
#pragma unroll 4
  for (int c = first + tid % 32; c < end; c += 32) {
    const float2 piece = a.partial_ml[slot(c)];
    sum += piece.y * ptx::ex2(piece.x - base);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
  const int d = tid % columns;
  float value = 0;
#pragma unroll 4
  for (int c = first + tid / columns; c < end; c += kCombineThreads / columns)
    if (d < p.head_dim) value += a.partial_o[slot(c) * p.head_dim + d] * ptx::ex2(a.partial_ml[slot(c)].x - base);
  sums[tid] = value;
  __syncthreads();
  if (tid >= columns) return;
  for (int other = tid + columns; other < kCombineThreads; other += columns) value += sums[other];
  const int b = item / p.kv_heads, group = p.query_heads / p.kv_heads;
  const int head = item % p.kv_heads * group + index / p.query_len, t = index % p.query_len;
  T* o = static_cast<T*>(p.o.data) + b * p.o.stride_b + t * p.o.stride_t + head * p.o.stride_h;
  if (tid < p.head_dim) o[tid] = T(sum == 0 ? 0.f : value / sum);  // NaN stays NaN
  if (tid == 0 && p.lse)
    p.lse[(int64_t(b) * p.query_heads + head) * p.query_len + t] =
        sum == 0 ? -INFINITY : (highest + log2f(sum)) * 0.69314718f;
}

/// One thread a (sequence, head): new keys come one or a few at a time.
__global__ void prefix_append_kernel(FoxPrefixCache cache, FoxGates log_f, int heads, int rows, int new_len,
                                     const int32_t* key_len) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int b = row / heads, h = row % heads, first = key_len[b] - new_len;
  float* r = cache.r + int64_t(row) * cache.max_blocks * kBiasBlock;
  float2* block = reinterpret_cast<float2*>(cache.block) + int64_t(row) * cache.max_blocks;
  float sum = first % kBiasBlock ? r[first - 1] : 0.f;
  for (int i = max(0, -first); i < new_len; ++i) {
    const int key = first + i, n = key / kBiasBlock;
    if (key % kBiasBlock == 0) {
      const double before = n ? double(block[n - 1].x) + block[n - 1].y + r[key - 1] : 0.;
      block[n] = {float(before), float(before - float(before))};
      sum = 0;
    }
    const float f = log_f.data[b * log_f.stride_b + i * log_f.stride_t + h * log_f.stride_h];
    r[key] = sum += usable_gate(f) * float(kLog2e);
  }
}

// ------------------------------------------------------------------------------------------------------- launcher

size_t layout_decode(const ForgettingDecodeParams& p, DecodeArgs* a) {
  *a = {p};
  const int items = p.batch * p.kv_heads;
  a->rows = p.query_len * (p.query_heads / p.kv_heads);
  a->row_blocks = (a->rows + kRows - 1) / kRows;
  a->block_heads = p.prefix.r ? std::min(p.query_heads / p.kv_heads, kRows) : 0;
  size_t used = 0;
  auto take = [&](auto*& pointer, size_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<char*>(p.workspace) + used);
    used += (count * sizeof(*pointer) + 255) / 256 * 256;
  };
  const size_t rows = (size_t(items) * a->row_blocks + size_t(kMostBlocks) * count_multiprocessors()) * kRows;
  take(a->begin, items);
  take(a->offset, items + 1);
  take(a->partial_o, rows * p.head_dim);
  take(a->partial_ml, rows);
  return used;
}

const char* check_decode(const ForgettingDecodeParams& p) {
  if (p.dtype != kFoxBfloat16 && p.dtype != kFoxFloat16) return "unsupported dtype: decoding takes bfloat16 or float16";
  if (p.head_dim < 8 || p.head_dim > 256 || p.head_dim % 8 != 0)
    return "unsupported head size: decoding takes multiples of 8 from 8 to 256";
  if (p.batch < 1 || p.query_len < 1 || p.kv_heads < 1 || p.query_heads % p.kv_heads != 0 || p.max_key_len < 1)
    return "decoding needs at least one sequence, query and key, and query heads a multiple of key/value heads";
  if (p.query_len * (p.query_heads / p.kv_heads) > 128) return "too many queries for decoding: use the forward pass";
  if (p.prefix.r && p.prefix.max_blocks * kBiasBlock < p.max_key_len) return "the cache of prefixes is too short";
  if (p.pruned && p.prefix.r && !p.logit_bound) return "pruning needs a bound of the logits for each head";
  auto bad = [](const FoxTensor& x) {
    return !x.data || reinterpret_cast<uintptr_t>(x.data) % 16 || x.stride_b % 8 || x.stride_t % 8 || x.stride_h % 8;
  };
  if (bad(p.q) || bad(p.k) || bad(p.v) || bad(p.o))
    return "q, k, v, o must start at and have strides of multiples of 16 bytes";
  return nullptr;
}

template <typename T, int kD>
cudaError_t launch_decode(DecodeArgs a, cudaStream_t stream) {
  auto* kernel = decode_kernel<T, kD>;
  using Warp = DecodeWarp<T, kD>;
  const int bytes = std::max(kWarps * Warp::warp_bytes(a.block_heads), kWarps * kRows * (kD + 8) * 4);
  int per_multiprocessor = 1;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (!error) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kWarps * 32, bytes);
  if (error) return error;
  a.workers = count_multiprocessors() * std::clamp(per_multiprocessor, 1, kMostBlocks);
  error = launch_early(decode_plan_kernel, 1, 1024, 0, stream, a);
  if (error) return error;
  error = launch_early(kernel, a.workers, kWarps * 32, bytes, stream, a);
  if (error) return error;
  return launch_early(decode_combine_kernel<T>, dim3(a.p.batch * a.p.kv_heads, a.rows), kCombineThreads, 0, stream, a,
                      kD);
}

template <typename T>
cudaError_t launch_decode(const DecodeArgs& a, cudaStream_t stream) {
  if (a.p.head_dim <= 64) return launch_decode<T, 64>(a, stream);
  if (a.p.head_dim <= 128) return launch_decode<T, 128>(a, stream);
  return launch_decode<T, 256>(a, stream);
}

}  // namespace
}  // namespace fox::cuda

extern "C" size_t fox_forgetting_decode_workspace(const ForgettingDecodeParams* params) {
  fox::cuda::DecodeArgs a;
  return fox::cuda::check_decode(*params) ? 0 : fox::cuda::layout_decode(*params, &a);
}

extern "C" int fox_forgetting_decode(const ForgettingDecodeParams* params, cudaStream_t stream) {
  using namespace fox::cuda;
  if (const char* wrong = check_decode(*params)) return fail(wrong);
  DecodeArgs a;
  if (!params->workspace || params->workspace_bytes < layout_decode(*params, &a))
    return fail("the workspace is too small");
  const cudaError_t error =
      params->dtype == kFoxBfloat16 ? launch_decode<__nv_bfloat16>(a, stream) : launch_decode<__half>(a, stream);
  return error ? fail("forgetting attention decoding", error) : 0;
}

extern "C" int fox_forgetting_prefix_append(FoxPrefixCache prefix, FoxGates log_f, int32_t batch, int32_t query_heads,
                                            int32_t new_len, const int32_t* key_len, cudaStream_t stream) {
  const int rows = batch * query_heads;
  fox::cuda::prefix_append_kernel<<<(rows + 127) / 128, 128, 0, stream>>>(prefix, log_f, query_heads, rows, new_len,
                                                                          key_len);
  const cudaError_t error = cudaGetLastError();
  return error ? fox::cuda::fail("appending gate prefixes", error) : 0;
}
