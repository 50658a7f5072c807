#pragma once

#include "kernels/cpu/chunks.h"

namespace fox::kernels {

/// Gated linear attention, S_t = exp(log_g_t) * S_{t-1} + k_t v_tᵀ, o_t = scale S_tᵀ q_t. T: float, double.
template <class T>
struct Hgrn2Params {
  HeadRows<const T> q, k, log_g, v;  ///< (B, T, H, K), v (B, T, H, V)
  const T* first;                    ///< (B, H, K, V), contiguous, as all states
  int64_t batch, length, heads, keys, values;
  T scale;

  int64_t state_size() const { return keys * values; }
};

/// o (B, T, H, V), last (B, H, K, V), kept (kept_states(chunks_of(T)), B, H, K, V).
template <class T>
void hgrn2(const Hgrn2Params<T>& p, const HeadRows<T>& o, T* last, T* kept);

template <class T>
struct Hgrn2Gradients {
  HeadRows<const T> d_o;  ///< (B, T, H, V)
  const T* dlast;         ///< (B, H, K, V)
  HeadRows<T> dq, dk, dlog_g, dv;
  T* dfirst;  ///< (B, H, K, V)
};
template <class T>
void hgrn2_backward(const Hgrn2Params<T>& p, const T* kept, const Hgrn2Gradients<T>& g);

}  // namespace fox::kernels
