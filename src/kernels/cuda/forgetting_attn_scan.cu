// The forget bias and the block bounds; see forgetting_attn_prefix.h.
//
// Two kernels. One, by blocks of 64 keys and up to 32 heads, sums the gates within a block in float32 and makes of them
// what needs no other block. The next, a thread block a (batch, head), sums the blocks' totals in float64, and with
// them the decayed mass of keys that says which blocks matter to which rows: prefix_kernel() has the bound.

#include <algorithm>
#include <type_traits>

#include "kernels/cuda/forgetting_attn_prefix.h"
#include "kernels/cuda/forgetting_attn_sm80.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {
namespace {

constexpr int kMaxThreads = 512, kMinThreads = 128;  // of prefix_kernel: one a block of keys or queries
constexpr int kGateThreads = 256, kGateHeads = 32, kHalfWarp = 16;
constexpr int kGatesAThread = kBiasBlock * kGateHeads / kGateThreads;  // at most
constexpr int kGatePitch = kBiasBlock + 4;
constexpr int kMaxSortedHeads = 4096;
// Bytes of marks that, beside the kernel's own variables, stay below the 48 KB of shared memory that need no leave.
constexpr size_t kMaxSharedMarks = 47 << 10;

/// What a row's log-sum-exp may be off by, generously: it comes from products of the tensor cores, summed in float32.
constexpr float kLseError = 0x1p-8f;

/// First key that the row at position p of batch row b may see (may exceed p: then it sees none).
__device__ int lower_bound_key(const ForgettingAttnParams& a, int b, int p) {
  int lower = 0;
  if (a.window > 0) lower = max(lower, p - a.window + 1);
  if (a.seq_start) lower = max(lower, int(a.seq_start[b]));
  if (a.cu_seqlens) {
    int first = 0, last = a.num_documents;  // the last document that starts at or before p
    while (last - first > 1) {
      const int middle = (first + last) / 2;
      if (a.cu_seqlens[middle] <= p)
        first = middle;
      else
        last = middle;
    }
    lower = max(lower, int(a.cu_seqlens[first]));
  }
  return lower;
}

__device__ float2 split(double x) {
  const float hi = float(x);
  return {hi, float(x - hi)};
}

__device__ uint64_t bad_gate_place(int batch, int time, int head) {
  return uint64_t{1} << 63 | uint64_t(batch & 0x7fff) << 48 | uint64_t(head & 0xffff) << 32 | uint32_t(time);
}

// ---------------------------------------------------------------------------------------------- blocks of 64 gates

/// A thread block's gates: those of one block of keys and up to kGateHeads heads, in units of log2 a row a head.
struct GateTile {
  int b, n, first_head, heads;
  int padding;  // keys of the block that are left padding, whose gates may hold anything
  float (*row)[kGatePitch];

  /// Reads them with heads side by side, as they usually lie: a thread has every `step`-th key of a head.
  __device__ __forceinline__ void load(const ForgettingAttnParams& a) const {
    const int inverse = int(__fdividef(65536.f, float(heads))) + 1;  // x * inverse >> 16 is x / heads for x <= 256
    const int step = kGateThreads * inverse >> 16, key = threadIdx.x * inverse >> 16, head = threadIdx.x - key * heads;
    const int keys = key < step ? kBiasBlock : 0;  // the last threads may have none
    const int end = min(keys, a.key_len - n * kBiasBlock);
    const float* log_f = a.log_f.data + b * a.log_f.stride_b + (int64_t{n} * kBiasBlock + key) * a.log_f.stride_t +
                         (first_head + head) * a.log_f.stride_h;
    float gate[kGatesAThread];  // all on their way before one is looked at
#pragma unroll
    for (int e = 0; e < kGatesAThread; ++e) {
      const int j = key + e * step;
      gate[e] = j >= padding && j < end ? *log_f : 0.f;
      log_f += step * a.log_f.stride_t;
    }
    bool is_bad = false;
#pragma unroll
    for (int e = 0; e < kGatesAThread; ++e) {
      const int j = key + e * step;
      is_bad |= !(gate[e] <= 0.f);
      if (j < keys) row[head][j] = usable_gate(gate[e]) * float(kLog2e);
    }
    if (!is_bad || a.bad_gate == nullptr) return;
    for (int j = key; j < keys; j += step)
      if (isnan(row[head][j]))  // this thread has written it
        *static_cast<volatile uint64_t*>(a.bad_gate) = bad_gate_place(b, n * kBiasBlock + j, first_head + head);
  }
};

template <typename F>
__device__ __forceinline__ float reduce_half_warp(float x, const F& f) {
#pragma unroll
  for (int step = kHalfWarp / 2; step > 0; step /= 2) x = f(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}

/// Prefixes of a block of one head, four keys a lane of half a warp.
struct BlockPrefix {
  float c[4];   // through each of this lane's keys
  float total;  // through the last key of the block
  int key;      // this lane's first key

  __device__ __forceinline__ BlockPrefix(const float* gates, int first_key) : key(first_key) {
    const float4 own = *reinterpret_cast<const float4*>(gates + key);
    const float two = own.x + own.y, three = two + own.z;
    float sum = three + own.w;
#pragma unroll
    for (int step = 1; step < kHalfWarp; step *= 2) {
      const float left = __shfl_up_sync(0xffffffff, sum, step, kHalfWarp);
      if (key >= 4 * step) sum += left;
    }
    total = __shfl_sync(0xffffffff, sum, kHalfWarp - 1, kHalfWarp);
    const float left = __shfl_up_sync(0xffffffff, sum, 1, kHalfWarp), before = key ? left : 0.f;
    c[0] = before + own.x, c[1] = before + two, c[2] = before + three, c[3] = sum;
  }

  __device__ __forceinline__ float at(int j) const {
    const float own = j % 4 == 0 ? c[0] : j % 4 == 1 ? c[1] : j % 4 == 2 ? c[2] : c[3];
    return __shfl_sync(0xffffffff, own, j / 4, kHalfWarp);
  }
  /// Σ_j 2^(c - c_j) over the keys first <= j <= last.
  __device__ __forceinline__ float mass(float through, int first, int last) const {
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += key + e >= first && key + e <= last ? ptx::ex2(through - c[e]) : 0.f;
    return reduce_half_warp(sum, [](float x, float y) { return x + y; });
  }
};

/// lse of the rows at four positions of a block; -inf where there is none, or of padding.
template <typename Lse>
struct BlockLse {
  Lse lse[4];

  __device__ __forceinline__ BlockLse(const ForgettingAttnParams& a, const GateTile& tile, int head, int key) {
    const int first = tile.n * kBiasBlock - (a.key_len - a.query_len) + key;
    const int64_t row = int64_t{tile.b} * a.query_heads + tile.first_head + head;
    const Lse* of_row = static_cast<const Lse*>(a.lse) + row * a.query_len + first;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      lse[e] = first + e >= 0 && first + e < a.query_len && key + e >= tile.padding ? of_row[e] : Lse(-INFINITY);
  }
  /// min_i (lse_i log2(e) - c_i) over the half warp's rows; inf if none of them sees a key.
  __device__ __forceinline__ float least(const BlockPrefix& prefix) const {
    float least = INFINITY;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float of_row = float(lse[e]) * float(kLog2e) - prefix.c[e];
      if (float(lse[e]) != -INFINITY) least = isnan(of_row) ? -INFINITY : fminf(least, of_row);
    }
    return reduce_half_warp(least, [](float x, float y) { return fminf(x, y); });
  }
};
template <>
struct BlockLse<void> {
  __device__ __forceinline__ BlockLse(const ForgettingAttnParams&, const GateTile&, int, int) {}
};

/// The rows of BiasTile of two heads' blocks, whose b_j the warp has left in `tile`; `first` is the place of the block
/// among those of the tile's first head.
__device__ __forceinline__ void write_bias(const ForgettingAttnPrefix& out, const GateTile& tile, int64_t first,
                                           int h) {
  const uint64_t one = uint64_t{ptx::kBf16One} << tile.n % 4 * 16;  // columns 3 to 6
  const int lane = threadIdx.x % 32;
  uint4* to = out.bias[first / 2 + int64_t{h} * (out.key_blocks / 2)].row + tile.n % 2 * kBiasBlock + lane;
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    if (h + head >= tile.heads) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // whole lines at a time
      const ptx::Bf16Triple part = ptx::split_bf16(tile.row[h + head][half * 32 + lane]);
      to[half * 32] = {part.high | part.middle << 16, part.low | uint32_t(one) << 16, uint32_t(one >> 16),
                       uint32_t(one >> 48)};
    }
    to += int64_t{out.key_blocks / 2} * int(sizeof(BiasTile) / sizeof(uint4));
  }
}

/// r, bias and the sums of one block of keys of kGateHeads heads. Lse: the type of the rows' log-sum-exps for backward,
/// void for forward.
template <typename Lse>
__global__ void __launch_bounds__(kGateThreads) gate_blocks_kernel(const __grid_constant__ ForgettingAttnParams a,
                                                                   const __grid_constant__ ForgettingAttnPrefix out) {
  constexpr int kWarps = kGateThreads / 32;
  __shared__ __align__(16) float gates[kGateHeads][kGatePitch];
  ptx::start_next_kernel();
  GateTile tile;
  tile.b = blockIdx.x, tile.n = blockIdx.y, tile.first_head = blockIdx.z * kGateHeads;
  tile.heads = min(kGateHeads, a.query_heads - tile.first_head);
  tile.padding = a.seq_start ? int(a.seq_start[tile.b]) - tile.n * kBiasBlock : 0;
  tile.row = gates;
  tile.load(a);
  __syncthreads();
  const float to_score = 1.f / (a.scale * float(kLog2e));
  const int64_t first = (int64_t(tile.b) * a.query_heads + tile.first_head) * out.key_blocks + tile.n;
  const int first_row = (a.key_len - a.query_len) & (kBiasBlock - 1);
  const bool is_second = threadIdx.x % 32 >= kHalfWarp;
  for (int h = threadIdx.x / 32 * 2; h < tile.heads; h += 2 * kWarps) {  // two heads a warp
    const bool exists = h + is_second < tile.heads;                      // of an odd number of heads the last is alone
    const int own = exists ? h + is_second : h, key = threadIdx.x % kHalfWarp * 4;
    const int64_t place = first + int64_t{own} * out.key_blocks;
    const BlockLse<Lse> rows(a, tile, own, key);
    const BlockPrefix prefix(gates[own], key);
    BlockSums sums{.total = prefix.total, .mass = prefix.mass(prefix.total, tile.padding, kBiasBlock - 1)};
    if constexpr (std::is_void_v<Lse>) {
      sums.row = prefix.c[0], sums.row_mass = 1.f;  // in the lane that writes them
      if (first_row != 0) {
        sums.row = prefix.at(first_row);
        sums.row_mass = fmaxf(1.f, prefix.mass(sums.row, tile.padding, first_row));
      }
    } else {
      sums.row = rows.least(prefix);
    }
    if (exists && key == 0) out.sums[place] = sums;
    if (!std::is_void_v<Lse> && exists && out.block) {
      float2* r = reinterpret_cast<float2*>(out.r + place * kBiasBlock);
      r[bias_slot(key) / 2] = {prefix.c[0], prefix.c[1]};
      r[bias_slot(key + 2) / 2] = {prefix.c[2], prefix.c[3]};
    }
    if (std::is_void_v<Lse> && out.bias) {
      float4 bias;
      bias.x = (prefix.total - prefix.c[0]) * to_score, bias.y = (prefix.total - prefix.c[1]) * to_score;
      bias.z = (prefix.total - prefix.c[2]) * to_score, bias.w = (prefix.total - prefix.c[3]) * to_score;
      __syncwarp();
      if (exists) *reinterpret_cast<float4*>(gates[own] + key) = bias;
      __syncwarp();
      write_bias(out, tile, first, h);
    }
  }
}

// ------------------------------------------------------------------------------------------------ prefixes of blocks

/// Σ_j 2^(c_e - c_j) over the keys of consecutive blocks, e the last of them; what came before decays by 2^decay on the
/// way through.
struct Mass {
  float decay, keys;
};
__device__ __forceinline__ Mass operator+(const Mass& left, const Mass& right) {
  return {left.decay + right.decay, fmaf(left.keys, ptx::ex2(right.decay), right.keys)};
}

/// What blocks of keys and rows are compared by, see prefix_kernel().
struct Marks {
  float* keys;  // by key block
  float* rows;  // of the first row of a query block, by the key block that it stands in
};
/// Marks of a head, and where its query blocks begin.
__host__ __device__ int64_t marks_of_head(const ForgettingAttnPrefix& out) {
  return 2 * (int64_t{out.key_blocks} + out.query_blocks);
}
size_t bytes_of_marks(const ForgettingAttnPrefix& out) { return marks_of_head(out) * sizeof(float); }

/// Totals of this head's blocks to prefixes, and to marks.
__device__ void sum_blocks(const ForgettingAttnParams& a, const ForgettingAttnPrefix& out, int64_t row, Marks marks) {
  __shared__ double warp_total[kMaxThreads / 32];
  __shared__ Mass warp_mass[kMaxThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool sees_all = a.window == 0 && !a.cu_seqlens;  // but for padding, which has no mass
  double carry = 0;
  Mass before_all{};
  for (int chunk = 0; chunk < out.key_blocks; chunk += blockDim.x) {
    const int block = chunk + threadIdx.x;
    const BlockSums own = block < out.key_blocks ? out.sums[row * out.key_blocks + block] : BlockSums{};
    double sum = own.total;
    Mass mass{own.total, own.mass};
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double left = __shfl_up_sync(0xffffffff, sum, step);
      const Mass left_mass{__shfl_up_sync(0xffffffff, mass.decay, step), __shfl_up_sync(0xffffffff, mass.keys, step)};
      if (lane >= step) sum += left, mass = left_mass + mass;
    }
    if (lane == 31) warp_total[warp] = sum, warp_mass[warp] = mass;
    __syncthreads();
    Mass before = before_all;
    const int warps = min(int(blockDim.x), out.key_blocks - chunk + 31) / 32;
    sum += carry;
    for (int w = 0; w < warps; ++w) {
      if (w < warp) sum += warp_total[w];
      carry += warp_total[w];
      if (w == warp) before = before_all;
      before_all = before_all + warp_mass[w];
    }
    mass = before + mass;
    const float left_keys = __shfl_up_sync(0xffffffff, mass.keys, 1), keys_before = lane ? left_keys : before.keys;
    if (block < out.key_blocks) {
      const double start = sum - own.total;
      if (out.block) out.block[row * out.key_blocks + block] = split(start);
      if (out.bias)
        reinterpret_cast<float2*>(&out.bias[(row * out.key_blocks + block) / 2].end)[block % 2] = split(sum);
      marks.keys[block] = __double2float_ru(log2f(mass.keys) - sum);
      const float row_keys = (sees_all ? keys_before * ptx::ex2(own.row) : 0.f) + own.row_mass;
      marks.rows[block] = out.pass == Pass::kBackward ? __double2float_rd(own.row - start)
                                                      : __double2float_rd(log2f(row_keys) - (start + own.row));
    }
    __syncthreads();
  }
}

/// x_i to min_{j >= i} x_j, for the rows' marks: no block may matter less to rows than to later ones.
__device__ void suffix_minima(float* x, int count) {
  __shared__ float warp_least[kMaxThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float carry = INFINITY;
  for (int end = count; end > 0; end -= int(blockDim.x)) {
    const int i = end - 1 - int(threadIdx.x);
    float least = i >= 0 ? x[i] : INFINITY;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) least = fminf(least, __shfl_up_sync(0xffffffff, least, step));
    if (lane == 31) warp_least[warp] = least;
    __syncthreads();
    least = fminf(least, carry);
    for (int w = 0; w < int(blockDim.x) / 32; ++w) {
      if (w < warp) least = fminf(least, warp_least[w]);
      carry = fminf(carry, warp_least[w]);
    }
    if (i >= 0) x[i] = least;
    __syncthreads();
  }
}

// ---------------------------------------------------------------------------------------------------- block bounds

/// First of `count` ascending values for which `is_behind`; `count` if there is none.
template <typename F>
__device__ __forceinline__ int first_of(int count, const F& is_behind) {
  int first = 0;
  while (first < count) {
    const int middle = (first + count) / 2;
    if (is_behind(middle))
      count = middle;
    else
      first = middle + 1;
  }
  return count;
}

/// For each key block the first query block that begins behind it, given where each query block begins.
__device__ void find_ends(int32_t* end, const int* begin, int key_blocks, int query_blocks) {
  for (int n = threadIdx.x; n < key_blocks; n += blockDim.x)
    end[n] = first_of(query_blocks, [&](int g) { return begin[g] > n; });
}

/// Which blocks matter. For logits of at most B keys up to e hold of row i's weights at most the share
///
///   exp(2 B) Σ_{j<=e} exp(-c_j) / Σ_{j<=i} exp(-c_j),  and where lse_i is known
///   exp(B) Σ_{j<=e} exp(-c_j) / exp(lse_i - c_i):
///
/// a product of a mark of e and one of i. Both grow with e and i, so a row's bound is found by halving. The second sum
/// is over what the row sees; with a window or documents over keys of its own block up to it, all of which it sees if
/// it sees any before the block.
__global__ void __launch_bounds__(kMaxThreads)
    prefix_kernel(const __grid_constant__ ForgettingAttnParams a, const __grid_constant__ ForgettingAttnPrefix out) {
  extern __shared__ float shared_marks[];
  __shared__ int kept;
  const int b = blockIdx.x / a.query_heads, h = blockIdx.x % a.query_heads;
  const int64_t row = blockIdx.x;
  const int offset = a.key_len - a.query_len;
  float* all_marks = out.marks ? out.marks + row * marks_of_head(out) : shared_marks;
  const Marks marks{all_marks, all_marks + out.key_blocks};
  int* begins = reinterpret_cast<int*>(all_marks + 2 * out.key_blocks);  // of pruning, window and so on
  int* near_begins = begins + out.query_blocks;
  ptx::start_next_kernel();
  const bool is_pruned = a.pruned && out.sums, has_near = out.near_begin || out.near_end;
  const float bound = is_pruned || has_near ? a.logit_bound[h] * 1.0001f : 0.f;  // logits are rounded
  const bool knows_lse = out.pass == Pass::kBackward;
  const float share =
      (is_pruned ? a.log_tolerance : log_near_share(a.dtype)) - (knows_lse ? bound + kLseError : 2 * bound);
  if (threadIdx.x == 0) kept = 0;
  ptx::wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x < kCounters) out.counters[threadIdx.x] = 0;
  if (out.lower)  // by all heads together
    for (int i = h * blockDim.x + threadIdx.x; i < a.query_len; i += a.query_heads * blockDim.x)
      out.lower[int64_t(b) * a.query_len + i] = lower_bound_key(a, b, i + offset);
  if (out.sums) sum_blocks(a, out, row, marks);
  if (out.sums && knows_lse) suffix_minima(marks.rows, out.key_blocks);
  __syncthreads();

  int kept_here = 0;
  for (int g = threadIdx.x; g < out.query_blocks; g += blockDim.x) {
    const int position = max(0, g * kBiasBlock + offset), diagonal = position / kBiasBlock;
    const int last = max(0, min(g * kBiasBlock + kBiasBlock - 1, a.query_len - 1) + offset) / kBiasBlock;
    int begin = lower_bound_key(a, b, position) / kBiasBlock;
    if (is_pruned || has_near) {
      // Rows whose mark is NaN, by a gate that is none, keep what begins with it: begins must ascend.
      const float row_mark = marks.rows[diagonal];
      const float least = isnan(row_mark) ? INFINITY : __fadd_rd(row_mark, share * float(kLog2e));
      const int matters = first_of(diagonal, [&](int n) { return !(marks.keys[n] < least); });  // so does NaN
      if (is_pruned) begin = max(begin, matters);
      if (out.near_begin) out.near_begin[row * out.query_blocks + g] = matters;
      near_begins[g] = matters;
    }
    begin = min(begin, last);
    out.key_begin[row * out.query_blocks + g] = begins[g] = begin;
    kept_here += last - begin + 1;
  }
  kept_here = __reduce_add_sync(0xffffffff, kept_here);
  if (threadIdx.x % 32 == 0) atomicAdd(&kept, kept_here);
  __syncthreads();
  if (threadIdx.x == 0) out.kept[row] = kept;
  if (out.query_end) find_ends(out.query_end + row * out.key_blocks, begins, out.key_blocks, out.query_blocks);
  if (out.near_end) find_ends(out.near_end + row * out.key_blocks, near_begins, out.key_blocks, out.query_blocks);
}

/// Heads by falling number of kept blocks: each thread counts the heads before its own.
__global__ void __launch_bounds__(256) head_order_kernel(const __grid_constant__ ForgettingAttnPrefix out, int heads) {
  const int own = blockIdx.x * 256 + threadIdx.x;
  ptx::start_next_kernel();
  ptx::wait_for_previous_kernel();
  if (own >= heads) return;
  const int kept = out.kept[own];
  int rank = 0;
  for (int other = 0; other < heads; ++other) {
    const int theirs = out.kept[other];
    rank += theirs > kept || (theirs == kept && other < own);
  }
  out.head_order[rank] = own;
}

}  // namespace

size_t layout_prefix(const ForgettingAttnParams& a, void* workspace, ForgettingAttnPrefix* out, Pass pass) {
  const size_t heads = size_t(a.batch) * a.query_heads;
  const bool has_gates = a.log_f.data != nullptr, is_backward = pass == Pass::kBackward,
             plain = runs_on_sm80_kernels(a);
  *out = {};
  out->pass = pass;
  out->key_blocks = (a.key_len + 127) / 128 * 2;
  out->query_blocks = (a.query_len + kBiasBlock - 1) / kBiasBlock;
  size_t used = 0;
  auto take = [&](auto*& pointer, size_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<char*>(workspace) + used);
    used += (count * sizeof(*pointer) + 255) / 256 * 256;
  };
  take(out->kept, heads);
  take(out->key_begin, heads * out->query_blocks);
  if (has_gates) {
    take(out->sums, heads * out->key_blocks);
    if (is_backward && !plain) {
      take(out->r, heads * out->key_blocks * kBiasBlock);
      take(out->block, heads * out->key_blocks);
    }
  }
  if (is_backward) take(out->query_end, heads * out->key_blocks);
  if (has_gates && a.logit_bound && !a.pruned && !plain) {
    if (!is_backward)
      take(out->near_begin, heads * out->query_blocks);
    else if (has_far_loop(a.head_dim))
      take(out->near_end, heads * out->key_blocks);
  }
  if (a.window > 0 || a.seq_start || a.cu_seqlens) take(out->lower, size_t(a.batch) * a.query_len);
  if (a.pruned && has_gates && heads <= kMaxSortedHeads) take(out->head_order, heads);
  if (bytes_of_marks(*out) > kMaxSharedMarks) take(out->marks, heads * marks_of_head(*out));
  take(out->counters, kCounters);
  if (has_gates && !is_backward && !plain) take(out->bias, heads * out->key_blocks / 2);
  return used;
}

cudaError_t launch_prefix(const ForgettingAttnParams& a, const ForgettingAttnPrefix& prefix, cudaStream_t stream) {
  const int heads = a.batch * a.query_heads;
  const int bytes = prefix.marks ? 0 : int(bytes_of_marks(prefix));
  const int blocks = std::max(prefix.key_blocks, prefix.query_blocks);
  const int threads = std::clamp((blocks + 31) / 32 * 32, kMinThreads, kMaxThreads);
  cudaError_t error = cudaSuccess;
  if (prefix.sums) {
    const dim3 grid(a.batch, prefix.key_blocks, (a.query_heads + kGateHeads - 1) / kGateHeads);
    const auto kernel = prefix.pass == Pass::kForward ? gate_blocks_kernel<void>
                        : a.dtype == kFoxFloat32      ? gate_blocks_kernel<double>
                                                      : gate_blocks_kernel<float>;
    kernel<<<grid, kGateThreads, 0, stream>>>(a, prefix);
    error = launch_early(prefix_kernel, heads, threads, bytes, stream, a, prefix);
  } else {
    prefix_kernel<<<heads, threads, bytes, stream>>>(a, prefix);
  }
  if (!error && prefix.head_order)
    error = launch_early(head_order_kernel, (heads + 255) / 256, 256, 0, stream, prefix, heads);
  return error ? error : cudaGetLastError();
}

}  // namespace fox::cuda
