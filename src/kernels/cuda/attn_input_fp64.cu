#include "kernels/cuda/attn_input.cuh"

namespace fox::cuda {
FOX_INSTANTIATE_ATTN_INPUT(double)
}  // namespace fox::cuda
