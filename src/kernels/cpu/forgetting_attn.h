#pragma once

#include <cstdint>
#include <limits>
#include <vector>

// Forgetting attention on the CPU: blocked, with online softmax, so that memory grows with T and not with T².
// Pointers and numbers only; strides count elements, the head dimension has stride 1.
namespace fox::kernels {

struct ForgettingAttnStrides {
  int64_t batch = 0, time = 0, head = 0;
};

/// What forward and backward share. T is float or double.
template <class T>
struct ForgettingAttnParams {
  int64_t batch = 0, q_len = 0, k_len = 0;  ///< queries stand at the last q_len of k_len positions
  int64_t heads = 0, kv_heads = 0;          ///< heads is a multiple of kv_heads
  int64_t head_dim = 0;
  const T* q = nullptr;      ///< (batch, q_len, heads, head_dim)
  const T* k = nullptr;      ///< (batch, k_len, kv_heads, head_dim)
  const T* v = nullptr;      ///< like k
  const T* log_f = nullptr;  ///< (batch, k_len, heads) or null
  ForgettingAttnStrides q_stride, k_stride, v_stride, log_f_stride;
  double scale = 1;
  int64_t window = std::numeric_limits<int64_t>::max();  ///< keys i - window < j <= i
  const int64_t* seq_start = nullptr;                    ///< (batch,): keys before it are padding; or null
  const int64_t* cu_seqlens = nullptr;                   ///< (documents + 1,), batch = 1, q_len = k_len; or null
  int64_t documents = 0;
  double log_pruning_tolerance = -std::numeric_limits<double>::infinity();  ///< ln ε; -inf computes every block
  const double* logit_bound = nullptr;  ///< (heads,) bound of |q·k * scale|, or null: measured
  int threads = 1;
};

template <class T>
struct ForgettingAttnOutput {
  T* o = nullptr;  ///< (batch, q_len, heads, head_dim) contiguous
  /// (batch, heads, q_len) contiguous; natural logarithm; -inf where a row sees no key. Backward forms every weight
  /// from it: rounded to float it would cost the gradients a digit.
  double* lse = nullptr;
};

/// Everything contiguous. d_log_f is null when log_f is.
template <class T>
struct ForgettingAttnGrads {
  const T* d_o = nullptr;  ///< like o
  const T* o = nullptr;
  const double* lse = nullptr;
  T* dq = nullptr;       ///< (batch, q_len, heads, head_dim)
  T* dk = nullptr;       ///< (batch, k_len, kv_heads, head_dim)
  T* dv = nullptr;       ///< like dk
  T* d_log_f = nullptr;  ///< (batch, k_len, heads)
};

/// A gate that no forget gate can be: above 0 or NaN.
struct BadGate {
  int64_t batch = -1, time = -1, head = -1;
  double value = 0;
  bool found() const { return batch >= 0; }
};

/// The first bad gate outside the left padding, if any. forward and backward want this checked before.
template <class T>
BadGate find_bad_gate(const ForgettingAttnParams<T>& params);

template <class T>
void forgetting_attn_forward(const ForgettingAttnParams<T>& params, const ForgettingAttnOutput<T>& out);

template <class T>
void forgetting_attn_backward(const ForgettingAttnParams<T>& params, const ForgettingAttnGrads<T>& grads);

/// (batch, heads): share of the causal 64×64 blocks that the kernels visit with these parameters.
template <class T>
std::vector<double> forgetting_attn_kept_share(const ForgettingAttnParams<T>& params);

}  // namespace fox::kernels
