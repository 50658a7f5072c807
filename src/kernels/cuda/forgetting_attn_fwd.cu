// Entry points of the forward pass: checks, the prefix kernel, then the kernel for the head size and dtype.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/forgetting_attn_sm80.h"

namespace fox::cuda {

template <typename T, int kHeadDim>
cudaError_t launch_forward_sm90(const ForgettingAttnParams&, const ForgettingAttnPrefix&, int multiprocessors,
                                cudaStream_t);

namespace {

template <typename T>
cudaError_t launch_for_head_size(const ForgettingAttnParams& p, const ForgettingAttnPrefix& prefix, int multiprocessors,
                                 cudaStream_t stream) {
  if (p.head_dim <= 32) return launch_forward_sm90<T, 32>(p, prefix, multiprocessors, stream);
  if (p.head_dim <= 64) return launch_forward_sm90<T, 64>(p, prefix, multiprocessors, stream);
  if (p.head_dim <= 96) return launch_forward_sm90<T, 96>(p, prefix, multiprocessors, stream);
  if (p.head_dim <= 128) return launch_forward_sm90<T, 128>(p, prefix, multiprocessors, stream);
  if (p.head_dim <= 192) return launch_forward_sm90<T, 192>(p, prefix, multiprocessors, stream);
  return launch_forward_sm90<T, 256>(p, prefix, multiprocessors, stream);
}

}  // namespace
}  // namespace fox::cuda

extern "C" size_t fox_forgetting_attn_forward_workspace(const ForgettingAttnParams* params) {
  using namespace fox::cuda;
  if (check_params(*params)) return 0;
  Sm80Args args;
  if (runs_on_sm80_kernels(*params)) return layout_sm80(*params, false, &args);
  ForgettingAttnPrefix prefix;
  return layout_prefix(*params, nullptr, &prefix, Pass::kForward);
}

extern "C" int fox_forgetting_attn_forward(const ForgettingAttnParams* params, cudaStream_t stream) {
  using namespace fox::cuda;
  if (const char* wrong = check_params(*params)) return fail(wrong);
  if (runs_on_sm80_kernels(*params)) return forward_sm80(*params, stream);
  ForgettingAttnPrefix prefix;
  const size_t needed = layout_prefix(*params, params->workspace, &prefix, Pass::kForward);
  if (!params->workspace || params->workspace_bytes < needed) return fail("the workspace is too small");
  const int multiprocessors = count_multiprocessors();
  if (cudaError_t error = launch_prefix(*params, prefix, stream)) return fail("forgetting attention prefix", error);
  const cudaError_t error = params->dtype == kFoxBfloat16
                                ? launch_for_head_size<__nv_bfloat16>(*params, prefix, multiprocessors, stream)
                                : launch_for_head_size<__half>(*params, prefix, multiprocessors, stream);
  return error ? fail("forgetting attention forward", error) : 0;
}
