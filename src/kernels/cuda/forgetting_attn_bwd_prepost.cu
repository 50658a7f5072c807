// Before and after the main backward kernel (forgetting_attn_bwd_sm90.cuh): Δ_i = o_i·dO_i and the row biases; dQ from
// its float32 sums; dlog_f from the row and column sums of dS.
//
// dL/dc_t = Σ_j dS_tj - Σ_i dS_it, and dlog_f is its sum from t on. In exact arithmetic rows sum to 0, but in bf16 they
// leave residuals which a suffix sum of columns alone would add up over the whole sequence; so rows count too, known
// for groups of 8 queries, which is fine enough: a residual reaches at most 7 gates too far.

#include "kernels/cuda/forgetting_attn_bwd.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {
namespace {

constexpr int kPreThreads = 256;
constexpr int kGateItems = 8, kGateChunk = kPreThreads * kGateItems;

template <typename T>
__device__ __forceinline__ float dot8(uint4 x, uint4 y) {
  const T* a = reinterpret_cast<const T*>(&x);
  const T* b = reinterpret_cast<const T*>(&y);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(float(a[i]), float(b[i]), sum);
  return sum;
}

__device__ __forceinline__ double log2_prefix(const BackwardArgs& a, int64_t head_row, int key) {
  const int64_t base = head_row * a.prefix.key_blocks;
  const float2 before = a.prefix.block[base + key / kBiasBlock];
  return double{before.x} + before.y + a.prefix.r[(base + key / kBiasBlock) * kBiasBlock + bias_slot(key % kBiasBlock)];
}

/// The biases of the rows of a tile of one (batch, head), a thread each, and their reference.
__device__ void write_row_biases(const BackwardArgs& a, int64_t head_row, int tile, int tile_rows, int low,
                                 bool by_mma) {
  const int x = threadIdx.x, i = tile * tile_rows + x;
  if (x >= tile_rows) return;
  const bool gate = a.prefix.r != nullptr;
  const double reference = gate ? log2_prefix(a, head_row, min(tile * tile_rows, a.query_len - 1) + a.offset) : 0.;
  const float lse = i >= low && i < a.query_len ? a.lse[head_row * a.query_len + i] : -INFINITY;
  const bool sees_keys = lse != -INFINITY;
  float u = sees_keys ? -lse * float(kLog2e) : -INFINITY;
  if (gate && sees_keys) u += static_cast<float>(log2_prefix(a, head_row, i + a.offset) - reference);
  float* bias = a.row_bias + (head_row * (a.padded_rows / tile_rows) + tile) * row_table_floats(by_mma, tile_rows);
  if (by_mma) {
    const ptx::Bf16Triple part = ptx::split_bf16(sees_keys ? u / a.sigma : kNoWeight);
    reinterpret_cast<uint4*>(bias)[x] = {ptx::kBf16One | ptx::kBf16One << 16, ptx::kBf16One | part.high << 16,
                                         part.middle | part.low << 16, 0};
  } else {
    bias[x] = u;
  }
  if (x == 0) {
    const float high = static_cast<float>(reference);
    *reinterpret_cast<float2*>(bias + (by_mma ? tile_rows * 4 : tile_rows)) = {high,
                                                                               static_cast<float>(reference - high)};
  }
}

/// Δ of a row of the padded tables.
__device__ __forceinline__ void write_delta(const BackwardArgs& a, int64_t row, float delta, bool by_mma) {
  if (by_mma) {
    const ptx::Bf16Triple part = ptx::split_bf16(-delta);
    reinterpret_cast<uint4*>(a.delta)[row] = {part.high | part.middle << 16, part.low, 0, 0};
  } else {
    a.delta[row] = delta;
  }
}

/// One block a tile of rows and (batch, head). kLanes lanes read a row, 16 bytes each.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kPreThreads)
    preprocess_kernel(const __grid_constant__ BackwardArgs a, int tile_rows, int padded_dim) {
  ptx::start_next_kernel();
  const int tiles = a.padded_rows / tile_rows, tile = blockIdx.x % tiles;
  const int64_t head_row = blockIdx.x / tiles;
  const int b = head_row / a.heads, h = head_row % a.heads;
  const int64_t row0 = head_row * a.padded_rows + tile * tile_rows;
  float4* sum = reinterpret_cast<float4*>(a.dq_sum + row0 * padded_dim);
  for (int i = threadIdx.x; i < tile_rows * padded_dim / 4; i += kPreThreads) sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x < tile_rows / 8) a.row_residual[row0 / 8 + threadIdx.x] = 0.f;
  if (threadIdx.x == 0 && a.dq_turn != nullptr) a.dq_turn[row0 / tile_rows] = 0;
  ptx::wait_for_previous_kernel();  // the prefixes
  const int low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) - a.offset : 0;
  write_row_biases(a, head_row, tile, tile_rows, low, bias_by_mma(a.prefix.r != nullptr, padded_dim));

  const T* o = static_cast<const T*>(a.o.data) + b * a.o.stride_b + h * a.o.stride_h;
  const T* d_o = static_cast<const T*>(a.d_o.data) + b * a.d_o.stride_b + h * a.d_o.stride_h;
  const int lane = threadIdx.x % kLanes;
  constexpr int kRows = kPreThreads / kLanes, kBatch = 4;  // rows at a time; batches of them whose loads go together
  for (int x0 = threadIdx.x / kLanes; x0 < tile_rows; x0 += kBatch * kRows) {
    uint4 out[kBatch] = {}, d_out[kBatch] = {};
    float lse[kBatch];
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const int i = tile * tile_rows + x0 + e * kRows;
      const bool is_valid = x0 + e * kRows < tile_rows && i >= low && i < a.query_len;
      lse[e] = is_valid && lane == 0 ? a.lse[head_row * a.query_len + i] : -INFINITY;
      if (!is_valid || lane * 8 >= a.head_dim) continue;
      out[e] = *reinterpret_cast<const uint4*>(o + i * a.o.stride_t + lane * 8);
      d_out[e] = *reinterpret_cast<const uint4*>(d_o + i * a.d_o.stride_t + lane * 8);
    }
#pragma unroll
    for (int e = 0; e < kBatch; ++e) {
      const int x = x0 + e * kRows;
      float delta = dot8<T>(out[e], d_out[e]);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
      if (lane == 0 && x < tile_rows)
        write_delta(a, row0 + x, lse[e] != -INFINITY ? delta : 0.f, sums_by_mma(padded_dim));
    }
  }
}

/// dlog_f of one (batch, head): a suffix sum in float64 over rows minus columns.
template <typename Sum>
struct GateGradient {
  const BackwardArgs& a;
  int b, h, low, query_low;
  const Sum *residual, *column;

  __device__ __forceinline__ GateGradient(const BackwardArgs& args, const Sum* rows, const Sum* columns, int head_row)
      : a(args),
        b(head_row / args.heads),
        h(head_row % args.heads),
        low(args.seq_start != nullptr ? static_cast<int>(args.seq_start[b]) : 0),
        query_low(max(0, low - args.offset)),
        residual(rows + int64_t{head_row} * (args.padded_rows / args.residual_rows)),
        column(columns + int64_t{head_row} * args.key_len) {}

  /// The part that each row has in the residual of its group.
  __device__ __forceinline__ double row_residual(int group) const {
    const int first = max(group * a.residual_rows, query_low), end = min((group + 1) * a.residual_rows, a.query_len);
    return double{residual[group]} / (end - first);
  }

  /// What position t adds to the gradients of all gates up to its own.
  __device__ __forceinline__ double at(int t) const {
    if (t < low) return 0.;
    return (t >= a.offset ? row_residual((t - a.offset) / a.residual_rows) : 0.) - double{column[t]};
  }

  /// This thread's share of the sum of x from entry `begin` up to `end`.
  __device__ __forceinline__ double share(const Sum* x, int begin, int end) const {
    double sum = 0.;
#pragma unroll 8
    for (int i = begin + threadIdx.x; i < end; i += kPreThreads) sum += x[i];
    return sum;
  }

  /// Sum of `x` over the threads up to this one; adds that over all of them to `total`.
  __device__ __forceinline__ double sum_up_to(double x, double& total) const {
    __shared__ double warp_sum[kPreThreads / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double left = __shfl_up_sync(0xffffffffu, x, step);
      if (lane >= step) x += left;
    }
    if (lane == 31) warp_sum[warp] = x;
    __syncthreads();
    for (int w = 0; w < kPreThreads / 32; ++w) {
      if (w < warp) x += warp_sum[w];
      total += warp_sum[w];
    }
    __syncthreads();
    return x;
  }

  /// This thread's share of what all positions from t on add.
  __device__ __forceinline__ double share_from(int t) const {
    const int row = max(t - a.offset, 0), group = row / a.residual_rows;  // a group that t may divide
    const int rest = min((group + 1) * a.residual_rows, a.query_len) - row;
    const int groups = (a.query_len + a.residual_rows - 1) / a.residual_rows;
    const double sum = share(residual, group + 1, groups) - share(column, t, a.key_len);
    return threadIdx.x == 0 && rest > 0 ? sum + rest * row_residual(group) : sum;
  }

  /// Positions of one chunk, number 0 at the end; the sum behind it is worked out anew, by all threads at once.
  __device__ __forceinline__ void write_chunk(int chunk) const {
    const int end = a.key_len - chunk * kGateChunk;
    double behind = 0., own = 0., all = 0.;
    sum_up_to(share_from(max(end, low)), behind);
    const int last = end - 1 - threadIdx.x * kGateItems;  // this thread's positions go down from here
#pragma unroll
    for (int e = 0; e < kGateItems; ++e) own += at(last - e);
    double sum = behind + sum_up_to(own, all) - own;
    const float* log_f = a.log_f.data + b * a.log_f.stride_b + h * a.log_f.stride_h;
    float* out = a.d_log_f.data + b * a.d_log_f.stride_b + h * a.d_log_f.stride_h;
#pragma unroll
    for (int e = 0; e < kGateItems; ++e) {
      const int t = last - e, i = t - a.offset;
      if (t < 0) continue;
      sum += at(t);
      // The first gate of a sequence weighs nothing, nor does one in padding; -inf is a constant.
      const bool is_first = t <= low || (a.prefix.lower && i >= 0 && a.prefix.lower[int64_t{b} * a.query_len + i] == t);
      const bool is_reset = log_f[t * a.log_f.stride_t] == -INFINITY;
      out[t * a.d_log_f.stride_t] = is_first || is_reset ? 0.f : static_cast<float>(sum);
    }
  }
};

__host__ __device__ int gate_chunks(const BackwardArgs& a) { return (a.key_len + kGateChunk - 1) / kGateChunk; }

template <typename Sum>
__device__ __forceinline__ void write_gate_gradient(const BackwardArgs& a, const Sum* rows, const Sum* columns) {
  const int chunks = gate_chunks(a);
  GateGradient<Sum>(a, rows, columns, blockIdx.x / chunks).write_chunk(blockIdx.x % chunks);
}
template <typename Sum>
__global__ void __launch_bounds__(kPreThreads)
    gate_gradient_kernel(const __grid_constant__ BackwardArgs a, const Sum* rows, const Sum* columns) {
  write_gate_gradient(a, rows, columns);
}

/// dlog_f by the first `gate_blocks` blocks, by the others dQ = scale · sum. A part of a tile (64 rows × `columns`)
/// lies as its warpgroup's accumulators did: 16-byte word c * 128 + thread holds rows r, r + 8 of columns 8 c + 2 q, +1
/// (see wgmma.cuh).
template <typename T>
__global__ void __launch_bounds__(kPreThreads)
    postprocess_kernel(const __grid_constant__ BackwardArgs a, int padded_dim, int gate_blocks) {
  extern __shared__ uint32_t staged[];  // 64 rows of pairs, 4 words of padding each
  ptx::wait_for_previous_kernel();
  if (blockIdx.x < gate_blocks) return write_gate_gradient(a, a.row_residual, a.column_sum);
  const int tile = blockIdx.x - gate_blocks, tiles = (a.query_len + 63) / 64, tile64 = tile % tiles;
  const int64_t head_row = tile / tiles;
  const int b = head_row / a.heads, h = head_row % a.heads;
  const int row_words = padded_dim / 2 + 4;
  const float4* sum =
      reinterpret_cast<const float4*>(a.dq_sum + (head_row * a.padded_rows + int64_t{tile64} * 64) * padded_dim);
  for (int i = threadIdx.x; i < 16 * padded_dim; i += kPreThreads) {
    const float4 x = sum[i];
    const int word = i / 128, t = i % 128;
    const int r = t / 32 * 16 + t % 32 / 4, pair = word * 4 + t % 4;
    staged[r * row_words + pair] = ptx::pack2<T>(x.x * a.scale, x.y * a.scale);
    staged[(r + 8) * row_words + pair] = ptx::pack2<T>(x.z * a.scale, x.w * a.scale);
  }
  __syncthreads();
  T* d_q = static_cast<T*>(a.d_q.data) + b * a.d_q.stride_b + h * a.d_q.stride_h;
  const int chunks = a.head_dim / 8;
  for (int i = threadIdx.x; i < 64 * chunks; i += kPreThreads) {
    const int row = i / chunks, chunk = i % chunks, query = tile64 * 64 + row;
    if (query < a.query_len)
      *reinterpret_cast<uint4*>(d_q + query * a.d_q.stride_t + chunk * 8) =
          *reinterpret_cast<const uint4*>(staged + row * row_words + chunk * 4);
  }
}

template <typename T>
cudaError_t preprocess(const BackwardArgs& a, int tile_rows, int padded_dim, cudaStream_t stream) {
  const unsigned blocks = unsigned(a.padded_rows / tile_rows) * a.batch * a.heads;
  const int chunks = a.head_dim / 8;
  const auto kernel = chunks <= 4    ? preprocess_kernel<T, 4>
                      : chunks <= 8  ? preprocess_kernel<T, 8>
                      : chunks <= 16 ? preprocess_kernel<T, 16>
                                     : preprocess_kernel<T, 32>;
  return launch_early(kernel, blocks, kPreThreads, 0, stream, a, tile_rows, padded_dim);
}

}  // namespace

cudaError_t launch_backward_preprocess(const BackwardArgs& a, int dtype, int tile_rows, int padded_dim,
                                       cudaStream_t stream) {
  return dtype == kFoxBfloat16 ? preprocess<__nv_bfloat16>(a, tile_rows, padded_dim, stream)
                               : preprocess<__half>(a, tile_rows, padded_dim, stream);
}

cudaError_t launch_backward_postprocess(const BackwardArgs& a, int dtype, int padded_dim, cudaStream_t stream) {
  const int tiles = (a.query_len + 63) / 64, heads = a.batch * a.heads;
  const int gate_blocks = a.d_log_f.data != nullptr && a.prefix.r != nullptr ? heads * gate_chunks(a) : 0;
  const int bytes = 64 * (padded_dim / 2 + 4) * 4;
  const auto kernel = dtype == kFoxBfloat16 ? postprocess_kernel<__nv_bfloat16> : postprocess_kernel<__half>;
  return launch_early(kernel, gate_blocks + tiles * heads, kPreThreads, bytes, stream, a, padded_dim, gate_blocks);
}

template <typename Sum>
cudaError_t launch_gate_gradient(const BackwardArgs& a, const Sum* rows, const Sum* columns, cudaStream_t stream) {
  gate_gradient_kernel<<<a.batch * a.heads * gate_chunks(a), kPreThreads, 0, stream>>>(a, rows, columns);
  return cudaGetLastError();
}
template cudaError_t launch_gate_gradient(const BackwardArgs&, const double*, const double*, cudaStream_t);

}  // namespace fox::cuda
