#include "kernels/cuda/forgetting_attn_bwd_sm80.cuh"

template cudaError_t fox::cuda::launch_forward_sm80<__half, 64>(const Sm80Args&, cudaStream_t);
template cudaError_t fox::cuda::launch_backward_sm80<__half, 64>(const Sm80Args&, cudaStream_t);
