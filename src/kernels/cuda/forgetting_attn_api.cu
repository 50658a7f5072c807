// What forward and backward share on the host: the checks of the parameters and the text of errors.

#include <cstdio>

#include "kernels/cuda/forgetting_attn_prefix.h"

namespace fox::cuda {
namespace {

thread_local char last_error[256] = "";

bool aligned(const FoxTensor& x, int32_t dtype, int batch, int time, int heads) {
  const int64_t vector = dtype == kFoxFloat32 ? 4 : 8;  // elements in 16 bytes
  auto is_multiple = [&](int64_t stride) { return stride % vector == 0; };
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (batch == 1 || is_multiple(x.stride_b)) &&
         (time == 1 || is_multiple(x.stride_t)) && (heads == 1 || is_multiple(x.stride_h));
}

}  // namespace

int compute_capability() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

int count_multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

int fail(const char* message) {
  snprintf(last_error, sizeof last_error, "%s", message);
  return 1;
}

int fail(const char* where, cudaError_t error) {
  snprintf(last_error, sizeof last_error, "%s: %s", where, cudaGetErrorString(error));
  return 1;
}

const char* check_params(const ForgettingAttnParams& a) {
  if (a.dtype != kFoxBfloat16 && a.dtype != kFoxFloat16 && a.dtype != kFoxFloat32)
    return "unsupported dtype: forgetting attention on CUDA takes bfloat16, float16 or float32";
  if (a.head_dim < 8 || a.head_dim > 256 || a.head_dim % 8 != 0)
    return "unsupported head size: forgetting attention on CUDA takes multiples of 8 from 8 to 256";
  if (a.batch < 1 || a.query_len < 1 || a.key_len < 1 || a.query_heads < 1 || a.kv_heads < 1)
    return "batch, lengths and numbers of heads must be at least 1";
  if (a.query_heads % a.kv_heads != 0) return "query heads must be a multiple of key/value heads";
  if (a.cu_seqlens && (a.batch != 1 || a.query_len != a.key_len || a.num_documents < 1))
    return "packed documents need batch 1 and as many queries as keys";
  if (a.window < 0) return "the window must be positive, or 0 for none";
  if (!(a.scale > 0)) return "the scale must be positive";
  if (a.pruned && a.log_f.data && !a.logit_bound) return "pruning needs a bound of the logits for each head";
  if (!a.q.data || !a.k.data || !a.v.data || !a.o.data || !a.lse) return "q, k, v, o and lse must be given";
  const auto of_queries = [&](const FoxTensor& x) { return aligned(x, a.dtype, a.batch, a.query_len, a.query_heads); };
  const auto of_keys = [&](const FoxTensor& x) { return aligned(x, a.dtype, a.batch, a.key_len, a.kv_heads); };
  if (!of_queries(a.q) || !of_keys(a.k) || !of_keys(a.v) || !of_queries(a.o))
    return "q, k, v and o must start at and have strides of multiples of 16 bytes";
  if (compute_capability() < 80)
    return "forgetting attention on CUDA needs compute capability 8.0 (A100, RTX 30) or later";
  return nullptr;
}

}  // namespace fox::cuda

extern "C" const char* fox_kernels_last_error() { return fox::cuda::last_error; }
