#include "kernels/cuda/forgetting_attn_fwd_sm90.cuh"

template cudaError_t fox::cuda::launch_forward_sm90<__nv_bfloat16, 64>(const ForgettingAttnParams&,
                                                                       const ForgettingAttnPrefix&, int, cudaStream_t);
