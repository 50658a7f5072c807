#pragma once

#include <cstdint>

namespace fox::kernels {

/// HGRN2's forget gates and keys from their logits (ops/hgrn2_gate.h).
template <class T>
struct Hgrn2GateParams {
  const T* logits;  ///< rows × channels, each row contiguous
  int64_t stride;   ///< elements from row to row
  const T* lower;   ///< channels, or nullptr for 0
  int64_t rows, channels;
};

/// log_g, k (rows × channels, contiguous).
template <class T>
void hgrn2_gate(const Hgrn2GateParams<T>& p, T* log_g, T* k);

/// From dlog_g and dk (rows × channels, contiguous): dlogits, likewise, and dlower (channels; or nullptr). The same
/// bits on any number of threads.
template <class T>
void hgrn2_gate_backward(const Hgrn2GateParams<T>& p, const T* dlog_g, const T* dk, T* dlogits, T* dlower);

}  // namespace fox::kernels
