// Entry points of the backward pass: checks, workspace, tensor maps, then the kernels in order.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/forgetting_attn_bwd.h"
#include "kernels/cuda/forgetting_attn_sm80.h"
#include "kernels/cuda/tensor_map.h"

namespace fox::cuda {
namespace {

constexpr int64_t kL2Bytes = 40 << 20;  // what the heads that run side by side may fill of 50 or 60 MB

int padded_head_dim(int head_dim) {
  for (int dim : kBackwardHeadDims)
    if (head_dim <= dim) return dim;
  return 0;
}

const char* check_backward(const ForgettingAttnParams& p) {
  if (const char* wrong = check_params(p)) return wrong;
  if (!p.d_o.data || !p.d_q.data || !p.d_k.data || !p.d_v.data) return "d_o, d_q, d_k and d_v must be given";
  const FoxTensor* tensors[] = {&p.d_o, &p.d_q, &p.d_k, &p.d_v};
  const int64_t vector = p.dtype == kFoxFloat32 ? 4 : 8;  // elements in 16 bytes
  for (const FoxTensor* x : tensors)
    if (reinterpret_cast<uintptr_t>(x->data) % 16 != 0 || (p.batch > 1 && x->stride_b % vector != 0) ||
        x->stride_t % vector != 0 || x->stride_h % vector != 0)
      return "d_o, d_q, d_k and d_v must start at and have strides of multiples of 16 bytes";
  return nullptr;
}

/// Fills everything but the tensor maps; returns the bytes of workspace.
size_t layout_backward(const ForgettingAttnParams& p, BackwardArgs* a) {
  *a = {};
  a->o = p.o, a->d_o = p.d_o, a->d_q = p.d_q;
  a->log_f = p.log_f, a->d_log_f = p.d_log_f, a->lse = static_cast<const float*>(p.lse);
  a->seq_start = p.seq_start, a->cu_seqlens = p.cu_seqlens, a->num_documents = p.num_documents;
  a->batch = p.batch, a->heads = p.query_heads, a->kv_heads = p.kv_heads, a->group = p.query_heads / p.kv_heads;
  a->query_len = p.query_len, a->key_len = p.key_len, a->head_dim = p.head_dim, a->window = p.window;
  a->offset = p.key_len - p.query_len;
  a->padded_rows = (p.query_len + kRowTile - 1) / kRowTile * kRowTile;
  a->deterministic = p.deterministic;
  a->scale = p.scale, a->sigma = static_cast<float>(p.scale * kLog2e);

  const int dim = padded_head_dim(p.head_dim), tile_rows = backward_tile_rows(dim);
  const int64_t head_bytes = int64_t{a->padded_rows} * dim * 8 * a->group;  // Q, dO in 16 bits, dQ in 32
  const int64_t kv_heads = int64_t{p.batch} * p.kv_heads;
  a->section_heads = static_cast<int>(std::clamp<int64_t>(kL2Bytes / head_bytes, 1, kv_heads));

  const size_t rows = size_t(p.batch) * p.query_heads * a->padded_rows, tiles = rows / tile_rows;
  size_t used = layout_prefix(p, p.workspace, &a->prefix, Pass::kBackward);
  auto take = [&](auto*& pointer, size_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(static_cast<char*>(p.workspace) + used);
    used += (count * sizeof(*pointer) + 255) / 256 * 256;
  };
  take(a->row_bias, tiles * row_table_floats(bias_by_mma(p.log_f.data != nullptr, dim), tile_rows));
  take(a->delta, rows * delta_floats(dim));
  take(a->dq_sum, rows * dim);
  take(a->row_residual, rows / kResidualRows);
  take(a->column_sum, size_t(p.batch) * p.query_heads * p.key_len);
  if (p.d_log_f.data) take(a->part_sums, size_t(p.batch) * p.query_heads * gate_parts(p.key_len));
  if (p.deterministic) take(a->dq_turn, tiles);
  return used;
}

cudaError_t make_maps(const ForgettingAttnParams& p, BackwardArgs* a, int dim) {
  const int rows = backward_tile_rows(dim), keys = backward_block_keys(dim);
  const auto map = [&](CUtensorMap* out, const FoxTensor& x, int length, int heads, int box_rows) {
    return make_tensor_map(out, x, p.dtype, p.batch, length, heads, p.head_dim, box_rows);
  };
  cudaError_t error = map(&a->map_q, p.q, p.query_len, p.query_heads, rows);
  if (!error) error = map(&a->map_do, p.d_o, p.query_len, p.query_heads, rows);
  if (!error) error = map(&a->map_k, p.k, p.key_len, p.kv_heads, keys);
  if (!error) error = map(&a->map_v, p.v, p.key_len, p.kv_heads, keys);
  if (!error) error = map(&a->map_dk, p.d_k, p.key_len, p.kv_heads, kBackwardKeyRows);
  if (!error) error = map(&a->map_dv, p.d_v, p.key_len, p.kv_heads, kBackwardKeyRows);
  return error;
}

template <typename T>
cudaError_t launch_for_head_size(const BackwardArgs& a, int dim, cudaStream_t stream) {
  switch (dim) {
    case 32:
      return launch_backward<T, 32>(a, stream);
    case 64:
      return launch_backward<T, 64>(a, stream);
    case 96:
      return launch_backward<T, 96>(a, stream);
    case 128:
      return launch_backward<T, 128>(a, stream);
    default:
      return launch_backward<T, 256>(a, stream);
  }
}

}  // namespace
}  // namespace fox::cuda

extern "C" size_t fox_forgetting_attn_backward_workspace(const ForgettingAttnParams* params) {
  using namespace fox::cuda;
  if (check_backward(*params)) return 0;
  Sm80Args portable;
  if (runs_on_sm80_kernels(*params)) return layout_sm80(*params, true, &portable);
  BackwardArgs args;
  return layout_backward(*params, &args);
}

extern "C" int fox_forgetting_attn_backward(const ForgettingAttnParams* params, cudaStream_t stream) {
  using namespace fox::cuda;
  if (const char* wrong = check_backward(*params)) return fail(wrong);
  if (runs_on_sm80_kernels(*params)) return backward_sm80(*params, stream);
  BackwardArgs args;
  const size_t needed = layout_backward(*params, &args);
  if (!params->workspace || params->workspace_bytes < needed) return fail("the workspace is too small");
  args.multiprocessors = count_multiprocessors();
  const int dim = padded_head_dim(params->head_dim), tile_rows = backward_tile_rows(dim);
  if (cudaError_t error = make_maps(*params, &args, dim)) return fail("tensor maps", error);
  if (cudaError_t error = launch_prefix(*params, args.prefix, stream))
    return fail("forgetting attention prefix", error);
  if (cudaError_t error = launch_backward_preprocess(args, params->dtype, tile_rows, dim, stream))
    return fail("forgetting attention backward, preprocessing", error);
  const cudaError_t error = params->dtype == kFoxBfloat16 ? launch_for_head_size<__nv_bfloat16>(args, dim, stream)
                                                          : launch_for_head_size<__half>(args, dim, stream);
  if (error) return fail("forgetting attention backward", error);
  if (cudaError_t error = launch_backward_postprocess(args, params->dtype, dim, stream))
    return fail("forgetting attention backward, postprocessing", error);
  return 0;
}
