#include <cmath>
#include <limits>

#include "ops/common.h"
#include "ops/forgetting_attn.h"

namespace fox::ops {
namespace {

/// Number of the document that each position belongs to, or 0.
at::Tensor documents(const ForgettingAttnOptions& options, const at::Tensor& positions) {
  if (!options.cu_seqlens) return at::zeros_like(positions);
  return at::searchsorted(options.cu_seqlens->to(positions.device()), positions, /*out_int32=*/false, /*right=*/true);
}

/// Which keys each query may see, (B or 1, 1, Tq, Tk).
at::Tensor visible(const ForgettingAttnOptions& options, const at::Tensor& j, int64_t q_len) {
  const auto i = j.slice(0, j.size(0) - q_len).unsqueeze(1);
  auto keep = j <= i;
  if (options.window) keep = keep & (j > i - *options.window);
  const auto document = documents(options, j);
  keep = keep & (document == document.slice(0, j.size(0) - q_len).unsqueeze(1));
  keep = keep.view({1, 1, q_len, j.size(0)});
  if (options.seq_start) keep = keep & (j >= options.seq_start->to(j.device()).view({-1, 1, 1, 1}));
  return keep;
}

}  // namespace

ForgettingAttnResult forgetting_attn_reference(const at::Tensor& q_BTHD, const at::Tensor& k_BTHD,
                                               const at::Tensor& v_BTHD, const std::optional<at::Tensor>& log_f_BTH,
                                               const ForgettingAttnOptions& options) {
  const int64_t q_len = q_BTHD.size(1), k_len = k_BTHD.size(1), group = q_BTHD.size(2) / k_BTHD.size(2);
  const auto q = q_BTHD.transpose(1, 2);
  const auto k = k_BTHD.transpose(1, 2).repeat_interleave(group, 1),
             v = v_BTHD.transpose(1, 2).repeat_interleave(group, 1);
  const auto j = at::arange(k_len, q.options().dtype(at::kLong));
  auto keep = visible(options, j, q_len);
  const double scale = options.scale.value_or(std::pow(static_cast<double>(q.size(-1)), -0.5));
  auto s = at::matmul(q, k.transpose(-1, -2)).to(compute_type(q.scalar_type())) * scale;
  if (log_f_BTH) {
    auto log_f = log_f_BTH->transpose(1, 2);  // (B, H, Tk)
    if (options.seq_start) {
      log_f = log_f.masked_fill(j < options.seq_start->to(j.device()).view({-1, 1, 1}), 0.0);
    }
    // -inf hides everything before it and stays out of the sums: -inf - -inf would be NaN.
    const auto reset = log_f == -std::numeric_limits<double>::infinity();
    const auto resets = reset.cumsum(-1);
    const auto c = log_f.masked_fill(reset, 0.0).to(at::kDouble).cumsum(-1);
    keep = keep & (resets.slice(-1, k_len - q_len).unsqueeze(-1) == resets.unsqueeze(-2));
    s = s + (c.slice(-1, k_len - q_len).unsqueeze(-1) - c.unsqueeze(-2)).to(s.scalar_type());
  }
  s = s.masked_fill(keep.logical_not(), -std::numeric_limits<double>::infinity());
  auto m = s.amax(-1, /*keepdim=*/true);
  m = m.masked_fill(m == -std::numeric_limits<double>::infinity(), 0.0).detach();
  const auto p = at::exp(s - m);
  const auto z = p.sum(-1, /*keepdim=*/true);
  const auto weights = p / z.masked_fill(z == 0, 1.0);
  return {at::matmul(weights.to(v.scalar_type()), v).transpose(1, 2), (m + at::log(z)).squeeze(-1).detach()};
}

}  // namespace fox::ops
