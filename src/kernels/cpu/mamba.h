#pragma once

#include <cstdint>

namespace fox::kernels {

/// Mamba's selective scan, h_t = exp(dt_t a) * h_{t-1} + dt_t x_t b_tᵀ, y_t = h_t c_t + d * x_t. T: float, double.
/// Everything is contiguous.
template <class T>
struct MambaParams {
  const T *x, *dt;     ///< (B, T, I)
  const T *b, *c;      ///< (B, T, N)
  const T *a, *d;      ///< (I, N), (I,)
  const T* first;      ///< (B, I, N)
  const bool* starts;  ///< (T,): a document starts, what is before is forgotten; or nullptr
  int64_t batch, length, channels, states;
};

/// The backward pass needs the states before every kMambaChunk-th token but the first.
constexpr int64_t kMambaChunk = 64;
inline int64_t mamba_chunks(int64_t length) { return (length + kMambaChunk - 1) / kMambaChunk; }

/// y (B, T, I), last (B, I, N), kept (chunks - 1, B, I, N).
template <class T>
void mamba(const MambaParams<T>& p, T* y, T* last, T* kept);

template <class T>
struct MambaGradients {
  const T* dy;     ///< (B, T, I)
  const T* dlast;  ///< (B, I, N)
  T *dx, *ddt;     ///< (B, T, I)
  T *db, *dc;      ///< (B, T, N)
  T *da, *dd;      ///< (I, N), (I,)
  T* dfirst;       ///< (B, I, N)
};
template <class T>
void mamba_backward(const MambaParams<T>& p, const T* kept, const MambaGradients<T>& g);

}  // namespace fox::kernels
