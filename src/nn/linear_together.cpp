#include "nn/linear_together.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include "base/error.h"

namespace fox::nn {
namespace {

// cuBLAS takes twice as long for products whose sizes are no multiple of 8.
constexpr int64_t kRowMultiple = 8;

/// dyᵀ x in `type`. On CUDA a product of 16-bit matrices can leave its float32 sums as they are.
at::Tensor weight_gradient(const at::Tensor& dy_NO, const at::Tensor& x_NC, at::ScalarType type) {
  if (!x_NC.is_cuda() || type == x_NC.scalar_type()) return at::mm(dy_NO.t(), x_NC).to(type);
  return at::mm(dy_NO.t(), x_NC, type);
}

// One node for all weights: the packed copy is no concern of autograd's.
class LinearPacked : public torch::autograd::Function<LinearPacked> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& packed,
                            at::TensorList weights) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({x, packed});
    std::vector<int64_t> rows;
    for (const auto& weight : weights) rows.push_back(weight.size(0));
    ctx->saved_data["rows"] = rows;
    ctx->saved_data["type"] = weights.front().scalar_type();
    return at::linear(x, packed);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (at::GradMode::is_enabled()) {
      throw Error("linear: the gradient of a gradient is not supported", "leave create_graph out");
    }
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &packed = saved[1];
    const auto rows = ctx->saved_data["rows"].toIntVector();
    const auto dy_NO = grads[0].reshape({-1, packed.size(0)}), x_NC = x.reshape({-1, packed.size(1)});
    torch::autograd::variable_list result;
    result.push_back(ctx->needs_input_grad(0) ? at::mm(dy_NO, packed).view(x.sizes()) : at::Tensor());
    result.emplace_back();
    const auto dw = weight_gradient(dy_NO, x_NC, ctx->saved_data["type"].toScalarType());
    // Each weight's share is a contiguous piece, which becomes its gradient without a copy.
    int64_t row = 0;
    for (const int64_t count : rows) {
      result.push_back(dw.narrow(0, row, count));
      row += count;
    }
    return result;
  }
};

at::Tensor apply(const at::Tensor& x, const std::vector<at::Tensor>& weights, const at::Tensor& matrix) {
  bool wants_grad = x.requires_grad();
  for (const auto& weight : weights) wants_grad = wants_grad || weight.requires_grad();
  if (!at::GradMode::is_enabled() || !wants_grad) return at::linear(x, matrix);
  return LinearPacked::apply(x, matrix, at::TensorList(weights));  // a list: the one kind that autograd looks into
}

}  // namespace

at::Tensor linear_packed(const at::Tensor& x, const std::vector<at::Tensor>& weights, const PackedWeights& packed) {
  return apply(x, weights, packed.get(weights, x.scalar_type()));
}

std::vector<at::Tensor> linear_together(const at::Tensor& x, const std::vector<at::Tensor>& weights,
                                        const PackedWeights& packed) {
  std::vector<int64_t> widths;
  for (const auto& weight : weights) widths.push_back(weight.size(0));
  const auto matrix = packed.get(weights, x.scalar_type(), kRowMultiple);
  int64_t padding = matrix.size(0);
  for (const int64_t width : widths) padding -= width;
  widths.push_back(padding);  // its gradient, which nobody asks for, is 0
  auto parts = apply(x, weights, matrix).split_with_sizes(widths, -1);
  parts.pop_back();
  return parts;
}

}  // namespace fox::nn
