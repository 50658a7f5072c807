// Before and after the main backward kernel (forgetting_attn_bwd_sm90.cuh): Δ_i = o_i·dO_i and the row biases; dQ from
// its float32 sums; dlog_f from the row and column sums of dS.
//
// dL/dc_t = Σ_j dS_tj - Σ_i dS_it, and dlog_f is its sum from t on. In exact arithmetic rows sum to 0, but in bf16 they
// leave residuals which a suffix sum of columns alone would add up over the whole sequence; so rows count too, known
// for groups of 8 queries, which is fine enough: a residual reaches at most 7 gates too far.

#include <algorithm>

#include "kernels/cuda/forgetting_attn_bwd.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/ptx.cuh"

namespace fox::cuda {
namespace {

constexpr int kPreThreads = 256;
// A thread block's heads of dlog_f, a warp each: neighbours, whose gates fill sectors of 32 bytes.
constexpr int kGateHeads = kPreThreads / 32;
constexpr int kGateItems = kGatePart / 32;  // positions of a lane
constexpr int kGatePitch = kGateHeads + 1, kGateBytes = kGatePart * kGatePitch * int(sizeof(float));

template <typename T>
__device__ __forceinline__ float dot8(uint4 x, uint4 y) {
  const T* a = reinterpret_cast<const T*>(&x);
  const T* b = reinterpret_cast<const T*>(&y);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(float(a[i]), float(b[i]), sum);
  return sum;
}

/// The biases of the rows of a tile of one (batch, head), a thread each, and their reference.
__device__ void write_row_biases(const BackwardArgs& a, int b, int h, int tile, int tile_rows, int low, bool by_mma) {
  const int x = threadIdx.x, i = tile * tile_rows + x;
  if (x >= tile_rows) return;
  const bool gate = a.prefix.r != nullptr;
  const int64_t head_row = int64_t{b} * a.heads + h;
  const GatePrefix prefix(a, b, h);
  const double reference = gate ? prefix(min(tile * tile_rows, a.query_len - 1) + a.offset) : 0.;
  const float lse = i >= low && i < a.query_len ? a.lse[head_row * a.query_len + i] : -INFINITY;
  const bool sees_keys = lse != -INFINITY;
  float u = sees_keys ? -lse * float(kLog2e) : -INFINITY;
  if (gate && sees_keys) u += static_cast<float>(prefix(i + a.offset) - reference);
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
__global__ void __launch_bounds__(kPreThreads, 4)
    preprocess_kernel(const __grid_constant__ BackwardArgs a, int tile_rows, int padded_dim) {
  ptx::start_next_kernel();
  const int tiles = a.padded_rows / tile_rows, tile = blockIdx.x % tiles;
  const int head_row = blockIdx.x / tiles, b = head_row / a.heads, h = head_row % a.heads;
  const int64_t row0 = int64_t{head_row} * a.padded_rows + tile * tile_rows;
  float4* sum = reinterpret_cast<float4*>(a.dq_sum + row0 * padded_dim);
  for (int i = threadIdx.x; i < tile_rows * padded_dim / 4; i += kPreThreads) sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (threadIdx.x < tile_rows / kResidualRows) a.row_residual[row0 / kResidualRows + threadIdx.x] = 0.f;
  if (a.part_sums != nullptr) {
    const int parts = gate_parts(a.key_len);
    uint64_t* part_sums = reinterpret_cast<uint64_t*>(a.part_sums) + int64_t{head_row} * parts;
    for (int i = tile * kPreThreads + threadIdx.x; i < parts; i += tiles * kPreThreads) part_sums[i] = kNoPartSum;
  }
  if (threadIdx.x == 0 && a.dq_turn != nullptr) a.dq_turn[row0 / tile_rows] = 0;
  const int low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) - a.offset : 0;
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
      lse[e] = is_valid && lane == 0 ? a.lse[int64_t{head_row} * a.query_len + i] : -INFINITY;
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
  ptx::wait_for_previous_kernel();  // the prefixes, which are made meanwhile
  write_row_biases(a, b, h, tile, tile_rows, low, bias_by_mma(a.prefix.r != nullptr, padded_dim));
}

/// dlog_f of a part of a sequence and neighbouring heads, a warp each: a suffix sum in float64 over rows minus columns.
/// What is behind the part the blocks tell each other: each publishes the sum of its own and waits for those behind it,
/// which have lower numbers and so are running or over. Memory is far away beside blocks of dQ, so everything is asked
/// for at once.
template <typename Sum, int kGroup>
struct GateGradient {
  const BackwardArgs& a;
  int b, first_head, heads, low, query_low, part;
  const Sum *residual, *column;  // of this warp's head
  double* part_sums;

  __device__ __forceinline__ GateGradient(const BackwardArgs& args, const Sum* rows, const Sum* columns, int block)
      : a(args) {
    const int parts = gate_parts(a.key_len), groups = (a.heads + kGateHeads - 1) / kGateHeads, number = block / parts;
    part = block % parts;
    b = number / groups, first_head = number % groups * kGateHeads;
    heads = min(kGateHeads, a.heads - first_head);
    low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) : 0;
    query_low = max(0, low - a.offset);
    const int64_t head_row = int64_t{b} * a.heads + first_head + min(int(threadIdx.x) / 32, heads - 1);
    residual = rows + head_row * (a.padded_rows / kGroup);
    column = columns + head_row * a.key_len;
    part_sums = a.part_sums + head_row * parts;
  }

  /// What this lane's positions, every 32nd of the part from `first` on, add to the gradients of all gates up to their
  /// own: of the residual of a group the part that each of its rows has, and the column.
  __device__ __forceinline__ void load(int first, double (&x)[kGateItems]) const {
    Sum columns[kGateItems], rows[kGateItems];
#pragma unroll
    for (int e = 0; e < kGateItems; ++e) {  // all on their way before one is looked at
      const int t = first + e * 32;
      columns[e] = t >= low ? column[t] : Sum(0);
      rows[e] = t >= max(low, a.offset) ? residual[(t - a.offset) / kGroup] : Sum(0);
    }
#pragma unroll
    for (int e = 0; e < kGateItems; ++e) {
      const int group = (first + e * 32 - a.offset) / kGroup;
      const int count = max(1, min((group + 1) * kGroup, a.query_len) - max(group * kGroup, query_low));
      if constexpr (kGroup > 1) rows[e] = count == kGroup ? rows[e] / kGroup : __fdividef(rows[e], float(count));
      x[e] = double{rows[e]} - double{columns[e]};
    }
  }

  __device__ __forceinline__ void publish(double sum) const {
    if (threadIdx.x % 32 == 0)
      reinterpret_cast<volatile uint64_t*>(part_sums)[part] = isnan(sum) ? kNoPartSum >> 1 : __double_as_longlong(sum);
  }

  /// The sum of all parts behind this one, once they are known.
  __device__ __forceinline__ double sum_behind() const {
    constexpr int kBatch = 4;
    const volatile uint64_t* sums = reinterpret_cast<const volatile uint64_t*>(part_sums);
    double behind = 0.;
    for (int i = threadIdx.x % 32; i < part; i += 32 * kBatch) {
      uint64_t sum[kBatch];
#pragma unroll
      for (int e = 0; e < kBatch; ++e) sum[e] = i + e * 32 < part ? sums[i + e * 32] : 0;
#pragma unroll
      for (int e = 0; e < kBatch; ++e) {
        while (sum[e] == kNoPartSum) sum[e] = sums[i + e * 32];
        behind += __longlong_as_double(sum[e]);
      }
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) behind += __shfl_xor_sync(0xffffffffu, behind, step);
    return behind;
  }

  /// The part's gradients, by way of `staged`, kGateBytes, where a warp has a head and then a lane.
  __device__ __forceinline__ void write(float* staged) const {
    const int lane = threadIdx.x % 32, begin = a.key_len - (part + 1) * kGatePart;  // negative in the last part
    double x[kGateItems];
    load(begin + lane, x);
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
#pragma unroll
      for (int e = 0; e < kGateItems; ++e) {
        const double right = __shfl_down_sync(0xffffffffu, x[e], step);
        if (lane + step < 32) x[e] += right;
      }
    double sum = 0.;
#pragma unroll
    for (int e = kGateItems - 1; e >= 0; --e) {
      const double all = __shfl_sync(0xffffffffu, x[e], 0);
      x[e] += sum;
      sum += all;
    }
    publish(sum);
    const int head = threadIdx.x % kGateHeads, first = begin + int(threadIdx.x) / kGateHeads;
    const int64_t to_gate = b * a.log_f.stride_b + (first_head + head) * a.log_f.stride_h;
    float gate[kGateItems];
#pragma unroll
    for (int e = 0; e < kGateItems; ++e) {
      const int t = first + e * 32;
      gate[e] = t >= 0 && head < heads ? a.log_f.data[to_gate + t * a.log_f.stride_t] : 0.f;
    }
    const double behind = sum_behind();
#pragma unroll
    for (int e = 0; e < kGateItems; ++e)
      staged[(e * 32 + lane) * kGatePitch + threadIdx.x / 32] = static_cast<float>(behind + x[e]);
    __syncthreads();
    float* out = a.d_log_f.data + b * a.d_log_f.stride_b + (first_head + head) * a.d_log_f.stride_h;
#pragma unroll
    for (int e = 0; e < kGateItems; ++e) {
      const int t = first + e * 32, i = t - a.offset;
      if (t < 0 || head >= heads) continue;
      // The first gate of a sequence weighs nothing, nor does one in padding; -inf is a constant.
      const bool is_first = t <= low || (a.prefix.lower && i >= 0 && a.prefix.lower[int64_t{b} * a.query_len + i] == t);
      const bool is_reset = gate[e] == -INFINITY;
      const float value = staged[(e * 32 + threadIdx.x / kGateHeads) * kGatePitch + head];
      out[t * a.d_log_f.stride_t] = is_first || is_reset ? 0.f : value;
    }
  }
};

int gate_blocks(const BackwardArgs& a) {
  return a.batch * ((a.heads + kGateHeads - 1) / kGateHeads) * gate_parts(a.key_len);
}

__global__ void __launch_bounds__(kPreThreads)
    gate_gradient_kernel(const __grid_constant__ BackwardArgs a, const double* rows, const double* columns) {
  extern __shared__ float staged_sums[];
  GateGradient<double, kResidualRowsSm80>(a, rows, columns, blockIdx.x).write(staged_sums);
}

/// dlog_f by the first `gate_blocks` blocks, by the others dQ = scale · sum. A part of a tile (64 rows × `columns`)
/// lies as its warpgroup's accumulators did: 16-byte word c * 128 + thread holds rows r, r + 8 of columns 8 c + 2 q, +1
/// (see wgmma.cuh).
template <typename T>
__global__ void __launch_bounds__(kPreThreads, 5)
    postprocess_kernel(const __grid_constant__ BackwardArgs a, int padded_dim, int gate_blocks) {
  extern __shared__ __align__(16) uint32_t staged[];  // 64 rows of pairs, 4 words of padding each
  ptx::wait_for_previous_kernel();
  if (blockIdx.x < gate_blocks)
    return GateGradient<float, kResidualRows>(a, a.row_residual, a.column_sum, blockIdx.x)
        .write(reinterpret_cast<float*>(staged));
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
  const int tiles = (a.query_len + 63) / 64 * a.batch * a.heads;
  const int blocks = a.d_log_f.data != nullptr && a.prefix.r != nullptr ? gate_blocks(a) : 0;
  const int bytes = std::max(64 * (padded_dim / 2 + 4) * 4, blocks > 0 ? kGateBytes : 0);
  const auto kernel = dtype == kFoxBfloat16 ? postprocess_kernel<__nv_bfloat16> : postprocess_kernel<__half>;
  return launch_early(kernel, blocks + tiles, kPreThreads, bytes, stream, a, padded_dim, blocks);
}

cudaError_t launch_gate_gradient(const BackwardArgs& a, const double* rows, const double* columns,
                                 cudaStream_t stream) {
  const size_t bytes = sizeof(double) * a.batch * a.heads * gate_parts(a.key_len);
  if (cudaError_t error = cudaMemsetAsync(a.part_sums, 0xff, bytes, stream)) return error;  // kNoPartSum
  gate_gradient_kernel<<<gate_blocks(a), kPreThreads, kGateBytes, stream>>>(a, rows, columns);
  return cudaGetLastError();
}

}  // namespace fox::cuda
