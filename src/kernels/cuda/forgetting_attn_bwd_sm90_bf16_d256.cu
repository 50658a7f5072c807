#include "kernels/cuda/forgetting_attn_bwd_wide_sm90.cuh"

namespace fox::cuda {
template cudaError_t launch_backward<__nv_bfloat16, 256>(const BackwardArgs&, cudaStream_t);
}
