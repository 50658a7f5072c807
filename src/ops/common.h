#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "ops/dtypes.h"

/// What the operators share. Each operator `fox::name` has kernels for CPU and Meta (and CUDA in the CUDA backend), and
/// an Autograd kernel whose backward is the operator `fox::name_backward`; checks stand in the kernels, so that callers
/// from C++ and from Python meet the same ones.
namespace fox::ops {

using OptionalTensor = std::optional<at::Tensor>;

/// The handle of a registered operator; keep it in a function's static: looking it up costs a lock and a hash.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

/// Whether autograd would record a call with these tensors.
inline bool wants_grad(std::initializer_list<const at::Tensor*> tensors) {
  if (!at::GradMode::is_enabled()) return false;
  for (const auto* t : tensors) {
    if (t->defined() && t->requires_grad()) return true;
  }
  return false;
}

/// The tensor or an undefined one: autograd and kernels know only the latter.
inline at::Tensor value_or_undefined(const std::optional<at::Tensor>& t) { return t ? *t : at::Tensor(); }
inline std::optional<at::Tensor> optional_of(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// Autograd kernel of a `…_backward` operator: throws fox::Error when someone asks for the gradient of a gradient.
void refuse_double_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
inline torch::CppFunction once_differentiable() {
  return torch::CppFunction::makeFromBoxedFunction<&refuse_double_backward>();
}

/// A tensor (..., width) seen as rows a constant stride apart, each row contiguous; `tensor` is a contiguous copy when
/// the original's strides do not allow that.
struct Rows {
  at::Tensor tensor;
  int64_t rows, width, stride;
};
Rows as_rows(const at::Tensor& t);

/// Checks of arguments. Each throws fox::Error "<op>: <argument> …" with what is supported as the hint.
void check_floating(const char* op, const char* argument, const at::Tensor& t);
void check_dtype(const char* op, const char* argument, const at::Tensor& t, at::ScalarType expected);
void check_dim(const char* op, const char* argument, const at::Tensor& t, int64_t dim, const char* layout);
/// `layout` names the expected shape, e.g. "(B, T, H)".
void check_shape(const char* op, const char* argument, const at::Tensor& t, at::IntArrayRef expected,
                 const char* layout);
/// Same device as `other`, named `other_argument`.
void check_device(const char* op, const char* argument, const at::Tensor& t, const char* other_argument,
                  const at::Tensor& other);
/// cu_seqlens is (N + 1,) int64, B = 1, rises from 0 to `length` (values are read on the CPU only).
void check_cu_seqlens(const char* op, const at::Tensor& cu_seqlens, int64_t batch, int64_t length);
/// seq_start is (B,) int64, within [0, length] (values are read on the CPU only).
void check_seq_start(const char* op, const at::Tensor& seq_start, int64_t batch, int64_t length);

/// "(2, 3, 4)".
std::string shape_string(at::IntArrayRef shape);

}  // namespace fox::ops
