#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace fox::nn {

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// f(inputs) whose intermediate results are not kept for the backward pass but computed again there (activation
/// checkpointing, arXiv 1604.06174): memory for one more forward pass of f. f must give the same results again; what it
/// reads besides its inputs may be leaf parameters, which get their gradients. At least one input must require a
/// gradient, or the parameters get none. Without gradients it is a plain call.
std::vector<at::Tensor> recomputed(const TensorFunction& f, const std::vector<at::Tensor>& inputs);

}  // namespace fox::nn
