// The forget bias and the block bounds; see forgetting_attn_prefix.h.
//
// A prefix sum over time in two levels: one kernel sums the gates within each block of 64 keys in float32, reading 32
// heads side by side since they lie side by side; the next, one thread block per (batch, head), sums the blocks' totals
// in float64. Since gates are <= 0, prefixes only fall, so whether a key block matters to a block of query rows is
// monotone in both and a binary search finds the bounds.

#include <algorithm>

#include "kernels/cuda/forgetting_attn_prefix.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kGateThreads = 256, kGateHeads = 32;
constexpr int kMaxSortedHeads = 4096;

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

__device__ BiasTile& bias_tile(const ForgettingAttnPrefix& out, int64_t row, int block) {
  return out.bias[(row * out.key_blocks + block) / 2];
}

/// One row of BiasTile.
__device__ uint4 bias_row(float b, int block) {
  const ptx::Bf16Triple part = ptx::split_bf16(b);
  const uint64_t one = uint64_t{ptx::kBf16One} << block % 4 * 16;  // columns 3 to 6
  return {part.high | part.middle << 16, part.low | uint32_t(one) << 16, uint32_t(one >> 16), uint32_t(one >> 48)};
}

__device__ uint64_t bad_gate_place(int batch, int time, int head) {
  return uint64_t{1} << 63 | uint64_t(batch & 0x7fff) << 48 | uint64_t(head & 0xffff) << 32 | uint32_t(time);
}

/// r, bias and (in the place of the prefix before the block) the total of one block of keys of kGateHeads heads.
__global__ void __launch_bounds__(kGateThreads) gate_blocks_kernel(const __grid_constant__ ForgettingAttnParams a,
                                                                   const __grid_constant__ ForgettingAttnPrefix out) {
  constexpr int kWarps = kGateThreads / 32, kRows = kBiasBlock / kWarps;
  __shared__ float tile[kBiasBlock][kGateHeads + 1];
  ptx::start_next_kernel();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head_groups = (a.query_heads + kGateHeads - 1) / kGateHeads;
  const int n = blockIdx.x % out.key_blocks, b = blockIdx.x / out.key_blocks / head_groups;
  const int first_head = blockIdx.x / out.key_blocks % head_groups * kGateHeads;
  const int padding = a.seq_start ? int(a.seq_start[b]) : 0;  // gates of padding may hold anything
  const float* log_f = a.log_f.data + b * a.log_f.stride_b + (first_head + lane) * a.log_f.stride_h;
  float gate[kRows];  // all on their way before one is looked at: the report below would order them otherwise
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int key = n * kBiasBlock + i * kWarps + warp;
    const bool valid = key >= padding && key < a.key_len && first_head + lane < a.query_heads;
    gate[i] = valid ? log_f[key * a.log_f.stride_t] : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float usable = usable_gate(gate[i]);
    if (isnan(usable) && a.bad_gate != nullptr)
      *static_cast<volatile uint64_t*>(a.bad_gate) =
          bad_gate_place(b, n * kBiasBlock + i * kWarps + warp, first_head + lane);
    tile[i * kWarps + warp][lane] = usable * float(kLog2e);
  }
  __syncthreads();
  const float to_score = 1.f / (a.scale * float(kLog2e));
  for (int h = warp; h < kGateHeads && first_head + h < a.query_heads; h += kWarps) {
    const int64_t row = int64_t(b) * a.query_heads + first_head + h;
    const float even = tile[2 * lane][h], odd = tile[2 * lane + 1][h];
    float sum = even + odd;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float left = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += left;
    }
    const float before = __shfl_up_sync(0xffffffff, sum, 1), all = __shfl_sync(0xffffffff, sum, 31);
    const float2 own = {(lane ? before : 0.f) + even, sum};
    reinterpret_cast<float2*>(out.r + (row * out.key_blocks + n) * kBiasBlock)[bias_slot(2 * lane) / 2] = own;
    if (out.bias) {
      uint4* rows = bias_tile(out, row, n).row + n % 2 * kBiasBlock;
#pragma unroll
      for (int key = lane; key < kBiasBlock; key += 32) {  // whole lines at a time
        const float of_even = __shfl_sync(0xffffffff, own.x, key / 2), of_odd = __shfl_sync(0xffffffff, own.y, key / 2);
        rows[key] = bias_row((all - (key % 2 ? of_odd : of_even)) * to_score, n);
      }
    }
    if (lane == 0) out.block[row * out.key_blocks + n] = {all, 0.f};
  }
}

/// Totals of this head's blocks to prefixes, in place.
__device__ void sum_blocks(const ForgettingAttnPrefix& out, int64_t row) {
  __shared__ double warp_total[kThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  double carry = 0;
  for (int chunk = 0; chunk < out.key_blocks; chunk += kThreads) {
    const int block = chunk + threadIdx.x;
    const double own = block < out.key_blocks ? out.block[row * out.key_blocks + block].x : 0.;
    double sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double left = __shfl_up_sync(0xffffffff, sum, step);
      if (lane >= step) sum += left;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) sum += warp_total[w];
    }
    sum += carry;
    for (int w = 0; w < kThreads / 32; ++w) carry += warp_total[w];
    if (block < out.key_blocks) {
      out.block[row * out.key_blocks + block] = split(sum - own);
      if (out.bias) reinterpret_cast<float2*>(&bias_tile(out, row, block).end)[block % 2] = split(sum);
    }
    __syncthreads();
  }
}

/// First key block whose best pair with the query block (its last key, the first row) decays by less than `threshold`.
__device__ int first_block_above(const ForgettingAttnPrefix& out, int64_t row, int position, float threshold) {
  const float2* block = out.block + row * out.key_blocks;
  const int diagonal = position / kBiasBlock;
  const float r = out.r[(row * out.key_blocks + diagonal) * kBiasBlock + bias_slot(position % kBiasBlock)];
  int first = 0, last = diagonal;  // the answer; the diagonal always counts
  while (first < last) {
    const int middle = (first + last) / 2;
    if (pair_difference(block[diagonal], block[middle + 1]) + r >= threshold)
      last = middle;
    else
      first = middle + 1;
  }
  return last;
}

/// For each key block the first query block that begins behind it, given where each query block begins.
__device__ void find_ends(int32_t* end, const int32_t* begin, int key_blocks, int query_blocks) {
  for (int n = threadIdx.x; n < key_blocks; n += kThreads) {
    int first = 0, last = query_blocks;
    while (first < last) {
      const int middle = (first + last) / 2;
      if (begin[middle] > n)
        last = middle;
      else
        first = middle + 1;
    }
    end[n] = last;
  }
}

__global__ void __launch_bounds__(kThreads)
    prefix_kernel(const __grid_constant__ ForgettingAttnParams a, const __grid_constant__ ForgettingAttnPrefix out) {
  const int b = blockIdx.x / a.query_heads, h = blockIdx.x % a.query_heads;
  const int64_t row = blockIdx.x;
  const int offset = a.key_len - a.query_len;
  ptx::start_next_kernel();
  ptx::wait_for_previous_kernel();
  if (blockIdx.x == 0 && threadIdx.x < kCounters) out.counters[threadIdx.x] = 0;
  if (out.r) sum_blocks(out, row);

  if (out.lower && h == 0)
    for (int i = threadIdx.x; i < a.query_len; i += kThreads)
      out.lower[int64_t(b) * a.query_len + i] = lower_bound_key(a, b, i + offset);

  __shared__ int kept;
  if (threadIdx.x == 0) kept = 0;
  __syncthreads();
  const bool pruned = a.pruned && out.r;
  /// Decay below which all keys of a row together weigh less than exp(log_share), whatever their logits.
  const auto threshold = [&](float log_share) {
    return (-2 * a.logit_bound[h] - logf(float(a.key_len)) + log_share) * float(kLog2e);
  };
  int32_t* key_begin = out.key_begin + row * out.query_blocks;
  int32_t* near_begin = out.near_begin ? out.near_begin + row * out.query_blocks : nullptr;
  int kept_here = 0;
  for (int g = threadIdx.x; g < out.query_blocks; g += kThreads) {
    const int position = max(0, g * kBiasBlock + offset);
    const int last = max(0, min(g * kBiasBlock + kBiasBlock - 1, a.query_len - 1) + offset) / kBiasBlock;
    int begin = lower_bound_key(a, b, position) / kBiasBlock;
    if (pruned) begin = max(begin, first_block_above(out, row, position, threshold(a.log_tolerance)));
    if (near_begin) near_begin[g] = first_block_above(out, row, position, threshold(kLogNearShare));
    key_begin[g] = min(begin, last);
    kept_here += last - key_begin[g] + 1;
  }
  atomicAdd(&kept, kept_here);
  __syncthreads();
  if (threadIdx.x == 0) out.kept[row] = kept;
  if (out.query_end) find_ends(out.query_end + row * out.key_blocks, key_begin, out.key_blocks, out.query_blocks);
  if (out.near_end) find_ends(out.near_end + row * out.key_blocks, near_begin, out.key_blocks, out.query_blocks);
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

size_t layout_prefix(const ForgettingAttnParams& a, void* workspace, ForgettingAttnPrefix* out, bool forward) {
  const size_t heads = size_t(a.batch) * a.query_heads;
  *out = {};
  out->key_blocks = (a.key_len + 127) / 128 * 2;
  out->query_blocks = (a.query_len + kBiasBlock - 1) / kBiasBlock;
  size_t used = 0;
  auto take = [&](auto*& pointer, size_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<char*>(workspace) + used);
    used += (count * sizeof(*pointer) + 255) / 256 * 256;
  };
  if (a.log_f.data) {
    take(out->r, heads * out->key_blocks * kBiasBlock);
    take(out->block, heads * out->key_blocks);
  }
  take(out->key_begin, heads * out->query_blocks);
  take(out->kept, heads);
  if (!forward) take(out->query_end, heads * out->key_blocks);
  if (a.log_f.data && a.logit_bound && !a.pruned) {
    take(out->near_begin, heads * out->query_blocks);
    if (!forward) take(out->near_end, heads * out->key_blocks);
  }
  if (a.window > 0 || a.seq_start || a.cu_seqlens) take(out->lower, size_t(a.batch) * a.query_len);
  if (a.pruned && a.log_f.data && heads <= kMaxSortedHeads) take(out->head_order, heads);
  take(out->counters, kCounters);
  if (forward && a.log_f.data) take(out->bias, heads * out->key_blocks / 2);
  return used;
}

cudaError_t launch_prefix(const ForgettingAttnParams& a, const ForgettingAttnPrefix& prefix, cudaStream_t stream) {
  const int heads = a.batch * a.query_heads;
  cudaError_t error = cudaSuccess;
  if (prefix.r) {
    const int groups = a.batch * ((a.query_heads + kGateHeads - 1) / kGateHeads);
    gate_blocks_kernel<<<groups * prefix.key_blocks, kGateThreads, 0, stream>>>(a, prefix);
    error = launch_early(prefix_kernel, heads, kThreads, 0, stream, a, prefix);
  } else {
    prefix_kernel<<<heads, kThreads, 0, stream>>>(a, prefix);
  }
  if (!error && prefix.head_order)
    error = launch_early(head_order_kernel, (heads + 255) / 256, 256, 0, stream, prefix, heads);
  return error ? error : cudaGetLastError();
}

}  // namespace fox::cuda
