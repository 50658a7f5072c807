#include "kernels/cuda/attn_input.cuh"

namespace fox::cuda {
FOX_INSTANTIATE_ATTN_INPUT(__nv_bfloat16)
}  // namespace fox::cuda
