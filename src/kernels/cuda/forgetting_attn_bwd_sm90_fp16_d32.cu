#include "kernels/cuda/forgetting_attn_bwd_sm90.cuh"

namespace fox::cuda {
template cudaError_t launch_backward<__half, 32>(const BackwardArgs&, cudaStream_t);
}
