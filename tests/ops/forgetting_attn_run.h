#pragma once

#include <torch/csrc/autograd/autograd.h>

#include <string>
#include <utility>
#include <vector>

#include "cases/forgetting_attn_cases.h"

namespace fox::testing_support {

/// Output, log-sum-exp and gradients by name; log_f's gradient is 0 where log_f is -inf.
using Results = std::vector<std::pair<std::string, at::Tensor>>;

template <class Op>
Results run(const cases::ForgettingAttnTensors& x, const Op& op) {
  const auto leaf = [](const at::Tensor& t) { return t.detach().clone().set_requires_grad(true); };
  const auto q = leaf(x.q), k = leaf(x.k), v = leaf(x.v);
  std::optional<at::Tensor> log_f;
  std::vector<at::Tensor> inputs{q, k, v};
  if (x.log_f) inputs.push_back(*(log_f = leaf(*x.log_f)));
  const auto out = op(q, k, v, log_f, x.options);
  auto grads =
      torch::autograd::grad({out.o_BTHD}, inputs, {x.d_o.to(out.o_BTHD.scalar_type())}, std::nullopt, false, true);
  Results results{{"o", out.o_BTHD.detach()}, {"lse", out.lse_BHT}};
  const char* names[] = {"dq", "dk", "dv", "dlog_f"};
  for (size_t i = 0; i < grads.size(); ++i) {
    results.emplace_back(names[i], grads[i].defined() ? grads[i] : at::zeros_like(inputs[i]));
  }
  return results;
}

inline Results run_op(const cases::ForgettingAttnTensors& x) {
  return run(x, [](const auto&... args) { return ops::forgetting_attn(args...); });
}
inline Results run_reference(const cases::ForgettingAttnTensors& x) {
  return run(x, [](const auto&... args) { return ops::forgetting_attn_reference(args...); });
}

}  // namespace fox::testing_support
