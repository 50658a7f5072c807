// Host side of the SM80 kernels: workspace, tables, dispatch. See forgetting_attn_sm80.cuh.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "kernels/cuda/forgetting_attn_bwd.h"
#include "kernels/cuda/forgetting_attn_sm80.h"

namespace fox::cuda {
namespace {

constexpr int kThreads = 512, kItems = 4;

__device__ __forceinline__ float2 split(double x) {
  const float hi = static_cast<float>(x);
  return {hi, static_cast<float>(x - hi)};
}

/// c_j·log2e of one (batch, head) for each block, summed in float64.
__global__ void __launch_bounds__(kThreads)
    key_prefix_kernel(const __grid_constant__ Sm80Args a, const __grid_constant__ FoxGates gates) {
  __shared__ double warp_sum[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t head_row = blockIdx.x;
  const int b = head_row / a.heads, h = head_row % a.heads;
  const int low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) : 0;
  const float* log_f = gates.data + b * gates.stride_b + h * gates.stride_h;
  float2* out = a.key_prefix + head_row * a.padded_keys;
  double carry = 0.;
  for (int chunk = 0; chunk < a.padded_keys; chunk += kThreads * kItems) {
    const int first = chunk + threadIdx.x * kItems;
    double own[kItems], sum = 0.;
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const int key = first + e;
      if (gates.data != nullptr && key >= low && key < a.key_len)
        sum += static_cast<double>(usable_gate(log_f[key * gates.stride_t])) * kLog2e;
      own[e] = sum;
    }
    double before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const double left = __shfl_up_sync(0xffffffffu, before, step);
      if (lane >= step) before += left;
    }
    if (lane == 31) warp_sum[warp] = before;
    __syncthreads();
    double base = carry + before - sum;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) base += warp_sum[w];
      carry += warp_sum[w];
    }
#pragma unroll
    for (int e = 0; e < kItems; ++e) {
      const int key = first + e;
      if (key < a.padded_keys) out[key] = key >= low && key < a.key_len ? split(base + own[e]) : float2{INFINITY, 0.f};
    }
    __syncthreads();
  }
}

/// One warp a row: Δ_i = o_i·dO_i and what else the backward pass needs of it.
template <typename T, typename Lse>
__global__ void __launch_bounds__(256) row_table_kernel(const __grid_constant__ Sm80Args a) {
  const int64_t at = int64_t(blockIdx.x) * 8 + threadIdx.x / 32, head_row = at / a.padded_rows;
  const int i = at % a.padded_rows, b = head_row / a.heads, h = head_row % a.heads, lane = threadIdx.x % 32;
  const int low = a.seq_start != nullptr ? static_cast<int>(a.seq_start[b]) - a.offset : 0;
  float4 row = {-INFINITY, 0.f, 0.f, 0.f};
  if (i >= low && i < a.query_len) {
    const T* o = static_cast<const T*>(a.o.data) + b * a.o.stride_b + h * a.o.stride_h + i * a.o.stride_t;
    const T* d_o = static_cast<const T*>(a.d_o.data) + b * a.d_o.stride_b + h * a.d_o.stride_h + i * a.d_o.stride_t;
    float delta = 0.f;
    for (int d = lane; d < a.head_dim; d += 32) delta = fmaf(float(o[d]), float(d_o[d]), delta);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, step);
    const double lse = static_cast<const Lse*>(a.lse)[head_row * a.query_len + i];
    if (lse != -INFINITY) {
      const float2 c = a.key_prefix[head_row * a.padded_keys + i + a.offset];
      const float2 u = split(double{c.x} + c.y - lse * kLog2e);
      row = {u.x, u.y, delta, __int_as_float(a.prefix.lower ? a.prefix.lower[int64_t(b) * a.query_len + i] : 0)};
    }
  }
  if (lane == 0) a.row_table[at] = row;
}

int padded_head_dim(int head_dim) {
  for (int dim : kSm80HeadDims)
    if (head_dim <= dim) return dim;
  return 0;
}

template <typename T>
cudaError_t forward_for_head_size(const Sm80Args& a, cudaStream_t stream) {
  const int dim = padded_head_dim(a.head_dim);
  if (dim == 64) return launch_forward_sm80<T, 64>(a, stream);
  if (dim == 128) return launch_forward_sm80<T, 128>(a, stream);
  return launch_forward_sm80<T, 256>(a, stream);
}

template <typename T>
cudaError_t backward_for_head_size(const Sm80Args& a, cudaStream_t stream) {
  using Lse = std::conditional_t<std::is_same_v<T, float>, double, float>;
  const int64_t rows = int64_t(a.batch) * a.heads * a.padded_rows;
  row_table_kernel<T, Lse><<<static_cast<unsigned>(rows / 8), 256, 0, stream>>>(a);
  const int dim = padded_head_dim(a.head_dim);
  if (dim == 64) return launch_backward_sm80<T, 64>(a, stream);
  if (dim == 128) return launch_backward_sm80<T, 128>(a, stream);
  return launch_backward_sm80<T, 256>(a, stream);
}

/// Picks T for the dtype.
template <typename F>
cudaError_t dispatch(int32_t dtype, const F& f) {
  if (dtype == kFoxBfloat16) return f.template operator()<__nv_bfloat16>();
  if (dtype == kFoxFloat16) return f.template operator()<__half>();
  return f.template operator()<float>();
}

int prepare(const ForgettingAttnParams& p, bool backward, Sm80Args* a, cudaStream_t stream) {
  const size_t needed = layout_sm80(p, backward, a);
  if (!p.workspace || p.workspace_bytes < needed) return fail("the workspace is too small");
  if (cudaError_t error = launch_prefix(p, a->prefix, stream)) return fail("forgetting attention prefix", error);
  key_prefix_kernel<<<p.batch * p.query_heads, kThreads, 0, stream>>>(*a, p.log_f);
  const cudaError_t error = cudaGetLastError();
  return error ? fail("forgetting attention prefix", error) : 0;
}

/// dlog_f from the sums, by the kernel of the SM90 backward pass.
cudaError_t gate_gradient(const ForgettingAttnParams& p, const Sm80Args& a, cudaStream_t stream) {
  if (p.d_log_f.data == nullptr || p.log_f.data == nullptr) return cudaSuccess;
  BackwardArgs g{};
  g.log_f = p.log_f, g.d_log_f = p.d_log_f, g.seq_start = p.seq_start, g.prefix = a.prefix;
  g.batch = a.batch, g.heads = a.heads, g.query_len = a.query_len, g.key_len = a.key_len, g.offset = a.offset;
  g.padded_rows = a.padded_rows, g.part_sums = a.part_sums;
  return launch_gate_gradient(g, a.row_sum, a.column_sum, stream);
}

}  // namespace

bool runs_on_sm80_kernels(const ForgettingAttnParams& p) {
  return p.dtype == kFoxFloat32 || p.use_sm80_kernels || compute_capability() != 90;
}

size_t layout_sm80(const ForgettingAttnParams& p, bool backward, Sm80Args* a) {
  *a = {};
  a->q = p.q, a->k = p.k, a->v = p.v, a->o = p.o, a->d_o = p.d_o, a->d_q = p.d_q, a->d_k = p.d_k, a->d_v = p.d_v;
  a->lse = p.lse, a->seq_start = p.seq_start;
  a->batch = p.batch, a->heads = p.query_heads, a->kv_heads = p.kv_heads, a->group = p.query_heads / p.kv_heads;
  a->query_len = p.query_len, a->key_len = p.key_len, a->head_dim = p.head_dim, a->offset = p.key_len - p.query_len;
  a->padded_rows = (p.query_len + 63) / 64 * 64, a->padded_keys = (p.key_len + 63) / 64 * 64;
  a->scale = p.scale, a->sigma = static_cast<float>(p.scale * kLog2e);
  const size_t heads = size_t(p.batch) * p.query_heads;
  size_t used = layout_prefix(p, p.workspace, &a->prefix, backward ? Pass::kBackward : Pass::kForward);
  auto take = [&](auto*& pointer, size_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<char*>(p.workspace) + used);
    used += (count * sizeof(*pointer) + 255) / 256 * 256;
  };
  take(a->key_prefix, heads * a->padded_keys);
  if (!backward) return used;
  take(a->row_table, heads * a->padded_rows);
  take(a->row_sum, heads * a->padded_rows);
  take(a->column_sum, heads * p.key_len);
  take(a->part_sums, heads * gate_parts(p.key_len));
  return used;
}

int forward_sm80(const ForgettingAttnParams& p, cudaStream_t stream) {
  Sm80Args a;
  if (int failed = prepare(p, false, &a, stream)) return failed;
  const cudaError_t error = dispatch(p.dtype, [&]<class T>() { return forward_for_head_size<T>(a, stream); });
  return error ? fail("forgetting attention forward", error) : 0;
}

int backward_sm80(const ForgettingAttnParams& p, cudaStream_t stream) {
  Sm80Args a;
  if (int failed = prepare(p, true, &a, stream)) return failed;
  cudaError_t error = dispatch(p.dtype, [&]<class T>() { return backward_for_head_size<T>(a, stream); });
  if (!error) error = gate_gradient(p, a, stream);
  return error ? fail("forgetting attention backward", error) : 0;
}

}  // namespace fox::cuda
