#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/forgetting_attn_prefix.h"

namespace fox::cuda {

/// Launches a kernel whose blocks may start while the kernel before it in the stream still runs, once all blocks of
/// that one have called ptx::start_next_kernel() or are over (programmatic dependent launch, from SM90 on). Every block
/// calls ptx::wait_for_previous_kernel() before it touches what others write or read. Kernels in a row of such launches
/// wait for each other in turn, so the first, launched as usual, finds all work before it done, and so do the rest.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_early(void (*kernel)(Parameters...), dim3 blocks, dim3 threads, int bytes, cudaStream_t stream,
                         Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = threads, config.dynamicSmemBytes = bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = compute_capability() >= 90;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace fox::cuda
