#pragma once

#include <cstdint>
#include <vector>

// What the kernels of the chunked recurrences (hgrn2, delta_net, mamba2) share.
namespace fox::kernels {

inline constexpr int64_t kChunk = 64;  ///< tokens computed together
/// The forward pass keeps the state before every so many-th chunk, but for the first one, which the caller has; the
/// backward pass computes those between again. A state of 128 × 128 is as large as keys, values and gates of 43 tokens.
inline constexpr int64_t kKeptEvery = 4;

inline int64_t chunks_of(int64_t length) { return (length + kChunk - 1) / kChunk; }
inline int64_t kept_states(int64_t chunks) { return (chunks - 1) / kKeptEvery; }

/// Some tokens that follow each other, at most 64, of one document.
struct TokenChunk {
  int64_t begin, rows;
  bool fresh;  ///< a document starts: nothing of the state before is left
};
/// starts (length,): whether a document starts at the token; or null.
std::vector<TokenChunk> cut_chunks(int64_t length, const bool* starts);

/// (B, T, H, D) as it lies in memory: any strides, in elements, but 1 of D.
template <class T>
struct HeadRows {
  T* data = nullptr;
  int64_t batch = 0, time = 0, head = 0;
  T* at(int64_t b, int64_t t, int64_t h) const { return data + b * batch + t * time + h * head; }
};

}  // namespace fox::kernels
