#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace fox::cuda {

/// States between chunks, S_{c+1} = decay_c * S_c + added_c, for `sequences` independent matrices (batch × heads) of
/// `elements` numbers (a multiple of 4): elementwise, so that every chunk but the recurrence itself is parallel.
struct ChunkScanParams {
  const float* added;   ///< (sequences, chunks, elements)
  const float* decay;   ///< (sequences, chunks, decays): 1, or one for each row of `elements / decays` numbers
  const float* first;   ///< (sequences, elements), or nullptr for 0
  __nv_bfloat16* seen;  ///< (sequences, chunks, elements): the state that each chunk starts from
  float* last;          ///< (sequences, elements)
  int64_t sequences, chunks, elements, decays;
  bool backwards;  ///< the chunks in reverse: `first` comes in behind the last chunk, `seen` is what is behind each
};
cudaError_t chunk_scan(const ChunkScanParams& p, cudaStream_t stream);

}  // namespace fox::cuda
