#include "eval/attention_map.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace fox::eval {
namespace {

/// Sums columns in blocks of `scale`, the last block may be narrower: (..., T) → (..., ceil(T / scale)).
at::Tensor pool_columns(const at::Tensor& x_RT, int64_t scale) {
  const int64_t cols = x_RT.size(1), blocks = (cols + scale - 1) / scale;
  return at::constant_pad_nd(x_RT, {0, blocks * scale - cols}).view({x_RT.size(0), blocks, scale}).sum(2);
}

std::vector<float> first_values(const at::Tensor& row, int64_t count) {
  const at::Tensor values = row.narrow(0, 0, count).to(at::kCPU, at::kFloat).contiguous();
  return {values.const_data_ptr<float>(), values.const_data_ptr<float>() + count};
}

}  // namespace

HeadMap attention_map(const at::Tensor& q_TD, const at::Tensor& k_TD, const at::Tensor& log_f_T,
                      std::optional<int64_t> window, int64_t map_size) {
  const at::Tensor q = q_TD.to(at::kDouble), k = k_TD.to(at::kDouble);
  const int64_t length = q.size(0);
  HeadMap map;
  map.scale = (length + map_size - 1) / map_size;
  at::Tensor c_T;  // D_ij = c_i - c_j
  // A hard reset (log f = -inf) would make differences NaN; e^-10000 is 0 as well.
  if (log_f_T.defined()) c_T = log_f_T.to(at::kDouble).clamp_min(-1e4).cumsum(0);
  const at::Tensor keys = at::arange(length, q.options().dtype(at::kLong)).unsqueeze(0);
  for (int64_t first = 0, r = 0; first < length; first += map.scale, ++r) {
    const int64_t n = std::min(map.scale, length - first);
    const at::Tensor queries = keys.narrow(1, first, n).t();
    const at::Tensor causal = keys.le(queries);
    at::Tensor logits = at::matmul(q.narrow(0, first, n), k.t()) / std::sqrt(static_cast<double>(q.size(1)));
    if (c_T.defined()) {
      const at::Tensor d = c_T.narrow(0, first, n).unsqueeze(1) - c_T.unsqueeze(0);
      const at::Tensor forget = d.exp().masked_fill(causal.logical_not(), 0);
      const at::Tensor entries = pool_columns(causal.to(at::kDouble), map.scale).sum(0).clamp_min(1);
      map.forget.push_back(first_values(pool_columns(forget, map.scale).sum(0) / entries, r + 1));
      logits = logits + d;
    }
    at::Tensor seen = causal;
    if (window) seen = seen.logical_and(keys.gt(queries - *window));
    const at::Tensor attention = at::softmax(logits.masked_fill(seen.logical_not(), -INFINITY), 1);
    map.attention.push_back(first_values(pool_columns(attention, map.scale).mean(0), r + 1));
  }
  return map;
}

}  // namespace fox::eval
