#pragma once

#include "kernels/cpu/chunks.h"

namespace fox::kernels {

/// The delta rule, S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}ᵀ k_t)ᵀ, o_t = scale S_tᵀ q_t. T: float, double.
template <class T>
struct DeltaNetParams {
  HeadRows<const T> q, k, v, beta;  ///< (B, T, H, K), v (B, T, H, V), beta (B, T, H, 1)
  const bool* starts;               ///< (T,): a document starts, what is before is forgotten; or nullptr
  const T* first;                   ///< (B, H, K, V), contiguous, as all states
  int64_t batch, length, heads, keys, values;
  T scale;

  int64_t state_size() const { return keys * values; }
};

/// How many states of each head the backward pass needs.
int64_t delta_net_kept(int64_t length, const bool* starts);

/// o (B, T, H, V), last (B, H, K, V), kept (delta_net_kept(), B, H, K, V).
template <class T>
void delta_net(const DeltaNetParams<T>& p, const HeadRows<T>& o, T* last, T* kept);

template <class T>
struct DeltaNetGradients {
  HeadRows<const T> d_o;  ///< (B, T, H, V)
  const T* dlast;         ///< (B, H, K, V)
  HeadRows<T> dq, dk, dv, dbeta;
  T* dfirst;  ///< (B, H, K, V)
};
template <class T>
void delta_net_backward(const DeltaNetParams<T>& p, const T* kept, const DeltaNetGradients<T>& g);

}  // namespace fox::kernels
