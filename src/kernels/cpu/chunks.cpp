#include "kernels/cpu/chunks.h"

namespace fox::kernels {

std::vector<TokenChunk> cut_chunks(int64_t length, const bool* starts) {
  std::vector<TokenChunk> chunks;
  for (int64_t t = 0; t < length; ++t) {
    const bool fresh = starts != nullptr && starts[t];
    if (chunks.empty() || fresh || chunks.back().rows == kChunk) chunks.push_back({t, 0, fresh});
    ++chunks.back().rows;
  }
  return chunks;
}

}  // namespace fox::kernels
