#pragma once

#include "kernels/cpu/chunks.h"

namespace fox::kernels {

/// The state space model of Mamba-2, h_t = exp(log_decay_t) h_{t-1} + dt_t x_t b_tᵀ, y_t = h_t c_t + d x_t, b and c
/// shared by the heads. T: float, double.
template <class T>
struct Mamba2Params {
  HeadRows<const T> x, dt, log_decay;  ///< (B, T, H, P), (B, T, H, 1)
  HeadRows<const T> b, c;              ///< (B, T, 1, N)
  const T* d;                          ///< (H,)
  const T* first;                      ///< (B, H, P, N), contiguous, as all states
  int64_t batch, length, heads, width, states;

  int64_t state_size() const { return width * states; }
};

/// y (B, T, H, P), last (B, H, P, N); kept (kept_states(chunks_of(T)), B, H, N, P), states transposed.
template <class T>
void mamba2(const Mamba2Params<T>& p, const HeadRows<T>& y, T* last, T* kept);

template <class T>
struct Mamba2Gradients {
  HeadRows<const T> dy;  ///< (B, T, H, P)
  const T* dlast;        ///< (B, H, P, N)
  HeadRows<T> dx, ddt, dlog_decay;
  HeadRows<T> db, dc;  ///< (B, T, tasks, N): of the heads of each task
  T* dd;               ///< (B, H)
  T* dfirst;           ///< (B, H, P, N)
};
/// Heads of a row are computed together, as many as leave each thread something to do; each such task has sums of its
/// own, which the caller adds up.
int64_t mamba2_tasks(int64_t batch, int64_t heads);
template <class T>
void mamba2_backward(const Mamba2Params<T>& p, const T* kept, const Mamba2Gradients<T>& g);

}  // namespace fox::kernels
