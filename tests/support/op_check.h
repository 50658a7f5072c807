#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/simd.h"

/// How operators are tested: against their reference at the same precision, and by finite differences.
namespace fox::test {

using Tensors = std::vector<at::Tensor>;
using Op = std::function<at::Tensor(const Tensors&)>;

/// Result of `op` and, for every floating input, the gradient of Σ result * cotangent.
inline Tensors result_and_gradients(const Op& op, const Tensors& inputs, const at::Tensor& cotangent) {
  Tensors leaves;
  for (const auto& t : inputs) {
    leaves.push_back(t.is_floating_point() ? t.detach().requires_grad_() : t);
  }
  const auto y = op(leaves);
  (y.to(at::kDouble) * cotangent).sum().backward();
  Tensors all{y.detach()};
  for (const auto& t : leaves) {
    if (t.is_floating_point()) all.push_back(t.grad().defined() ? t.grad() : at::zeros_like(t));
  }
  return all;
}

inline double max_error(const at::Tensor& a, const at::Tensor& exact) {
  if (a.numel() == 0) return 0;
  return (a.to(at::kDouble) - exact.to(at::kDouble)).abs().max().item<double>();
}

/// `op` in `type` is as good as `reference` in `type`, both measured against `reference` in float64 on the same
/// (rounded) inputs, results and gradients alike: error <= 2 * the reference's error + one rounding of the result + a
/// few of float32 arithmetic on values of order 1, which is what is left where a sum cancels. In float64 nothing is
/// more exact to measure against: there both agree to 1e-12.
inline void expect_as_good_as_reference(const Op& op, const Op& reference, const Tensors& inputs, at::ScalarType type,
                                        const std::string& what) {
  Tensors rounded, doubles;
  for (const auto& t : inputs) {
    rounded.push_back(t.is_floating_point() ? t.to(type) : t);
    doubles.push_back(t.is_floating_point() ? rounded.back().to(at::kDouble) : t);
  }
  // `to` keeps a view's strides only where it copies nothing: put them back, since strides are under test.
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].is_floating_point() || rounded[i].strides() == inputs[i].strides()) continue;
    auto strided = at::empty_strided(inputs[i].sizes(), inputs[i].strides(), rounded[i].options());
    strided.copy_(rounded[i]);
    rounded[i] = strided;
  }
  const auto shape = reference(doubles).sizes().vec();
  const auto cotangent = at::randn(shape, at::kDouble);
  const auto exact = result_and_gradients(reference, doubles, cotangent);
  const auto naive = result_and_gradients(reference, rounded, cotangent);
  const auto ours = result_and_gradients(op, rounded, cotangent);
  const double unit = type == at::kFloat ? 1.2e-7 : type == at::kHalf ? 9.8e-4 : 7.8e-3;
  for (size_t i = 0; i < exact.size(); ++i) {
    const std::string name =
        what + ", " + std::string(c10::toString(type)) + (i == 0 ? ", result" : ", gradient " + std::to_string(i - 1));
    ASSERT_EQ(ours[i].sizes(), exact[i].sizes()) << name;
    ASSERT_EQ(ours[i].scalar_type(), naive[i].scalar_type()) << name;
    const double scale = exact[i].numel() == 0 ? 0 : exact[i].abs().max().item<double>();
    const double tiny = type == at::kDouble ? 1e-12 * (1 + scale) : unit * scale + 1e-6 * (1 + scale);
    EXPECT_LE(max_error(ours[i], exact[i]), 2 * max_error(naive[i], exact[i]) + tiny) << name;
  }
}

/// The gradients of `op` agree with central differences, element by element (float64 inputs).
inline void expect_gradients_match_differences(const Op& op, const Tensors& inputs, const std::string& what,
                                               double tolerance = 1e-7) {
  const auto cotangent = at::randn(op(inputs).sizes(), at::kDouble);
  const auto all = result_and_gradients(op, inputs, cotangent);
  const double step = 1e-5;
  size_t gradient = 1;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].is_floating_point()) continue;
    auto flat = inputs[i].detach().clone(at::MemoryFormat::Contiguous);
    const auto at_value = [&](int64_t e, double value) {
      flat.view(-1)[e].fill_(value);
      Tensors moved = inputs;
      moved[i] = flat;
      return (op(moved) * cotangent).sum().item<double>();
    };
    const auto numeric = at::zeros_like(flat);
    for (int64_t e = 0; e < flat.numel(); ++e) {
      const double value = flat.view(-1)[e].item<double>();
      numeric.view(-1)[e].fill_((at_value(e, value + step) - at_value(e, value - step)) / (2 * step));
      flat.view(-1)[e].fill_(value);
    }
    const double scale = 1 + numeric.abs().max().item<double>();
    EXPECT_LE(max_error(all[gradient], numeric), tolerance * scale) << what << ", input " << i;
    ++gradient;
  }
}

/// Runs `body` once on each instruction set that kernels were compiled for and this machine has.
inline void on_every_simd_path(const std::function<void(const std::string& path)>& body) {
  for (const auto& path : kernels::simd_paths()) {
    kernels::force_simd_path(path);
    body(path);
  }
  kernels::force_simd_path("");
}

/// `body` throws fox::Error with all of `parts` in its message and hint.
inline void expect_error(const std::function<void()>& body, const std::vector<std::string>& parts) {
  try {
    body();
  } catch (const Error& error) {
    const std::string text = std::string(error.what()) + " | " + error.hint();
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' in: " << text;
    return;
  }
  ADD_FAILURE() << "no fox::Error; expected one with '" << (parts.empty() ? "" : parts[0]) << "'";
}

/// Differentiating a gradient of `op` is refused.
inline void expect_double_backward_refused(const Op& op, const Tensors& inputs) {
  Tensors leaves;
  for (const auto& t : inputs) leaves.push_back(t.is_floating_point() ? t.detach().requires_grad_() : t);
  const auto loss = op(leaves).square().sum();
  expect_error([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }, {"first derivatives only"});
}

/// `op` on Meta tensors gives the shape and dtype that it gives on the CPU.
inline void expect_meta_agrees(const Op& op, const Tensors& inputs) {
  Tensors meta;
  for (const auto& t : inputs) meta.push_back(t.to(at::kMeta));
  const auto real = op(inputs), shape_only = op(meta);
  EXPECT_TRUE(shape_only.is_meta());
  EXPECT_EQ(shape_only.sizes(), real.sizes());
  EXPECT_EQ(shape_only.scalar_type(), real.scalar_type());
}

}  // namespace fox::test
