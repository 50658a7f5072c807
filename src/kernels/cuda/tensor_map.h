#pragma once

// Tensor maps for the copy engine. cuTensorMapEncodeTiled is a driver function; it is looked up at run time so that
// the library links against the CUDA runtime alone and loads on machines without a driver.

#include <cuda.h>
#include <cuda_runtime.h>

#include "kernels/cuda/forgetting_attn.h"

namespace fox::cuda {

/// Map of a 16-bit (batch, time, head, head_dim) tensor with coordinates (d, t, h, b) and boxes of `rows` times by 64
/// of head_dim, 128-byte swizzled. What lies outside (d >= head_dim, t >= time) reads as 0 and is not written.
inline cudaError_t make_tensor_map(CUtensorMap* map, const FoxTensor& x, int32_t dtype, int64_t batch, int64_t time,
                                   int64_t heads, int64_t head_dim, uint32_t rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static Encode encode = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found);
    return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(symbol) : nullptr;
  }();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[4] = {cuuint64_t(head_dim), cuuint64_t(time), cuuint64_t(heads), cuuint64_t(batch)};
  // Strides of dimensions of size 1 may be anything in the caller's tensor; the encoder wants multiples of 16 bytes.
  const cuuint64_t strides[3] = {cuuint64_t(time > 1 ? x.stride_t * 2 : 16 * ((head_dim + 7) / 8)),
                                 cuuint64_t(heads > 1 ? x.stride_h * 2 : 16),
                                 cuuint64_t(batch > 1 ? x.stride_b * 2 : 16)};
  const cuuint32_t box[4] = {64, rows, 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const auto type = dtype == kFoxBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(map, type, 4, x.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace fox::cuda
