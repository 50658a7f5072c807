// Before and after the main backward kernel (forgetting_attn_bwd_sm90.cuh): Δ_i = o_i·dO_i and the row biases; dQ from
// its float32 sums; dlog_f from the row and column sums of dS.
//
// dL/dc_t = Σ_j dS_tj - Σ_i dS_it, and dlog_f is its sum from t on. In exact arithmetic rows sum to 0, but in bf16 they
// leave residuals which a suffix sum of columns alone would add up over the whole sequence; so rows count too, known
// for groups of 8 queries, which is fine enough: a residual reaches at most 7 gates too far.

#include "kernels/cuda/forgetting_attn_bwd.h"
#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {
namespace {

constexpr int kPreThreads = 256;
constexpr int kScanThreads = 512;
constexpr int kScanItems = 8;

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

/// One block a tile of rows and (batch, head). kLanes lanes read a row, 16 bytes each.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kPreThreads)
    preprocess_kernel(const __grid_constant__ BackwardArgs a, int tile_rows, int padded_dim) {
  const int tiles = a.padded_rows / tile_rows, tile = blockIdx.x % tiles;
  const int64_t head_row = blockIdx.x / tiles;
  const int b = head_row / a.heads, h = head_row % a.heads;
  const int64_t row0 = head_row * a.padded_rows + tile * tile_rows;
  const int low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) - a.offset : 0;
  const T* o = static_cast<const T*>(a.o.data) + b * a.o.stride_b + h * a.o.stride_h;
  const T* d_o = static_cast<const T*>(a.d_o.data) + b * a.d_o.stride_b + h * a.d_o.stride_h;
  const int first = min(tile * tile_rows, a.query_len - 1);
  const double reference = a.prefix.r != nullptr ? log2_prefix(a, head_row, first + a.offset) : 0.;
  const bool gate = a.prefix.r != nullptr;
  const bool by_mma = bias_by_mma(gate, padded_dim);
  float* bias = a.row_bias + row0 / tile_rows * row_table_floats(by_mma, tile_rows);

  const int lane = threadIdx.x % kLanes;
  for (int x = threadIdx.x / kLanes; x < tile_rows; x += kPreThreads / kLanes) {
    const int i = tile * tile_rows + x;
    const bool is_valid = i >= low && i < a.query_len;
    float delta = 0.f;
    if (is_valid && lane * 8 < a.head_dim)
      delta = dot8<T>(*reinterpret_cast<const uint4*>(o + i * a.o.stride_t + lane * 8),
                      *reinterpret_cast<const uint4*>(d_o + i * a.d_o.stride_t + lane * 8));
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
    if (lane != 0) continue;
    const float lse = is_valid ? a.lse[head_row * a.query_len + i] : -INFINITY;
    const bool sees_keys = lse != -INFINITY;
    a.delta[row0 + x] = sees_keys ? delta : 0.f;
    float u = sees_keys ? -lse * float(kLog2e) : -INFINITY;
    if (gate && sees_keys) u += static_cast<float>(log2_prefix(a, head_row, i + a.offset) - reference);
    if (by_mma) {
      const ptx::Bf16Triple part = ptx::split_bf16(sees_keys ? u / a.sigma : kNoWeight);
      reinterpret_cast<uint4*>(bias)[x] = {ptx::kBf16One | ptx::kBf16One << 16, ptx::kBf16One | part.high << 16,
                                           part.middle | part.low << 16, 0};
    } else {
      bias[x] = u;
    }
  }
  if (threadIdx.x == 0) {
    const float high = static_cast<float>(reference);
    *reinterpret_cast<float2*>(bias + (by_mma ? tile_rows * 4 : tile_rows)) = {high,
                                                                               static_cast<float>(reference - high)};
    if (a.dq_turn != nullptr) a.dq_turn[row0 / tile_rows] = 0;
  }
  if (threadIdx.x < tile_rows / 8) a.row_residual[row0 / 8 + threadIdx.x] = 0.f;
  float4* sum = reinterpret_cast<float4*>(a.dq_sum + row0 * padded_dim);
  for (int i = threadIdx.x; i < tile_rows * padded_dim / 4; i += kPreThreads) sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

/// dQ = scale · sum. A part of a tile (64 rows × `columns`) lies as its warpgroup's accumulators did: 16-byte word
/// c * 128 + thread holds rows r, r + 8 of columns 8 c + 2 q, +1 (see wgmma.cuh).
template <typename T>
__global__ void __launch_bounds__(kPreThreads)
    postprocess_kernel(const __grid_constant__ BackwardArgs a, int padded_dim) {
  extern __shared__ uint32_t staged[];  // 64 rows of pairs, 4 words of padding each
  const int tiles = (a.query_len + 63) / 64, tile64 = blockIdx.x % tiles;
  const int64_t head_row = blockIdx.x / tiles;
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

/// dlog_f of one (batch, head): a suffix sum in float64 over rows minus columns, from the last position down.
template <typename Sum>
__global__ void __launch_bounds__(kScanThreads)
    gate_gradient_kernel(const __grid_constant__ BackwardArgs a, const Sum* rows, const Sum* columns) {
  __shared__ double warp_sum[kScanThreads / 32];
  const int b = blockIdx.x / a.heads, h = blockIdx.x % a.heads, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t head_row = blockIdx.x;
  const int low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) : 0;
  const Sum* residual = rows + head_row * (a.padded_rows / a.residual_rows);
  const int shared_rows = a.residual_rows;
  const Sum* column = columns + head_row * a.key_len;
  const float* log_f = a.log_f.data + b * a.log_f.stride_b + h * a.log_f.stride_h;
  float* out = a.d_log_f.data + b * a.d_log_f.stride_b + h * a.d_log_f.stride_h;
  const int query_low = max(0, low - a.offset);
  double carry = 0.;
  constexpr int kChunk = kScanThreads * kScanItems;
  for (int done = 0; done < a.key_len; done += kChunk) {
    const int last = a.key_len - 1 - done - threadIdx.x * kScanItems;  // this thread's positions go down from here
    double sum = 0., part[kScanItems];
#pragma unroll
    for (int e = 0; e < kScanItems; ++e) {
      const int t = last - e, i = t - a.offset;
      if (t >= low) sum -= column[t];
      if (t >= low && i >= 0) {
        const int group = i / shared_rows, first_row = max(group * shared_rows, query_low),
                  end_row = min((group + 1) * shared_rows, a.query_len);
        sum += double{residual[group]} / (end_row - first_row);
      }
      part[e] = sum;
    }
    double before = sum;  // inclusive sum over the threads up to this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double left = __shfl_up_sync(0xffffffffu, before, step);
      if (lane >= step) before += left;
    }
    if (lane == 31) warp_sum[warp] = before;
    __syncthreads();
    double base = carry + before - sum;
    for (int w = 0; w < kScanThreads / 32; ++w) {
      if (w < warp) base += warp_sum[w];
      carry += warp_sum[w];
    }
#pragma unroll
    for (int e = 0; e < kScanItems; ++e) {
      const int t = last - e, i = t - a.offset;
      if (t < 0) continue;
      // The first gate of a sequence weighs nothing, nor does one in padding; -inf is a constant.
      const bool is_first = t <= low || (a.prefix.lower && i >= 0 && a.prefix.lower[int64_t{b} * a.query_len + i] == t);
      const bool is_reset = log_f[t * a.log_f.stride_t] == -INFINITY;
      out[t * a.d_log_f.stride_t] = is_first || is_reset ? 0.f : static_cast<float>(base + part[e]);
    }
    __syncthreads();
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
  kernel<<<blocks, kPreThreads, 0, stream>>>(a, tile_rows, padded_dim);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_backward_preprocess(const BackwardArgs& a, int dtype, int tile_rows, int padded_dim,
                                       cudaStream_t stream) {
  return dtype == kFoxBfloat16 ? preprocess<__nv_bfloat16>(a, tile_rows, padded_dim, stream)
                               : preprocess<__half>(a, tile_rows, padded_dim, stream);
}

cudaError_t launch_backward_postprocess(const BackwardArgs& a, int dtype, int padded_dim, cudaStream_t stream) {
  const unsigned blocks = unsigned((a.query_len + 63) / 64) * a.batch * a.heads;
  const int bytes = 64 * (padded_dim / 2 + 4) * 4;
  const auto kernel = dtype == kFoxBfloat16 ? postprocess_kernel<__nv_bfloat16> : postprocess_kernel<__half>;
  kernel<<<blocks, kPreThreads, bytes, stream>>>(a, padded_dim);
  if (a.d_log_f.data != nullptr && a.prefix.r != nullptr)
    return launch_gate_gradient(a, a.row_residual, a.column_sum, stream);
  return cudaGetLastError();
}

template <typename Sum>
cudaError_t launch_gate_gradient(const BackwardArgs& a, const Sum* rows, const Sum* columns, cudaStream_t stream) {
  gate_gradient_kernel<<<a.batch * a.heads, kScanThreads, 0, stream>>>(a, rows, columns);
  return cudaGetLastError();
}
template cudaError_t launch_gate_gradient(const BackwardArgs&, const double*, const double*, cudaStream_t);

}  // namespace fox::cuda
