#include "ops/common.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"

namespace fox::ops {

std::string shape_string(at::IntArrayRef shape) {
  return fmt::format("({})", fmt::join(shape.begin(), shape.end(), ", "));
}

void refuse_double_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto num_arguments = op.schema().arguments().size();
  for (const auto& argument : torch::jit::last(*stack, num_arguments)) {
    if (argument.isTensor() && wants_grad({&argument.toTensor()})) {
      throw Error(
          fmt::format("{} cannot be differentiated: fox operators have first derivatives only", op.schema().name()),
          "leave out create_graph, or use the operator's reference, which is differentiable any number of times");
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

Rows as_rows(const at::Tensor& t) {
  const int64_t width = t.size(-1), rows = width == 0 ? 0 : t.numel() / width;
  if (t.is_contiguous()) return {t, rows, width, width};
  bool regular = t.stride(-1) == 1 || width == 1;
  int64_t stride = 0, step = 0;  // of the innermost dimension longer than 1, and what the next one must be
  for (int64_t i = t.dim() - 2; regular && i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (stride == 0) {
      stride = t.stride(i);
    } else {
      regular = t.stride(i) == step;
    }
    step = t.stride(i) * t.size(i);
  }
  if (regular) return {t, rows, width, stride};
  return {t.contiguous(), rows, width, width};
}

void check_floating(const char* op, const char* argument, const at::Tensor& t) {
  const auto type = t.scalar_type();
  if (type == at::kFloat || type == at::kDouble || type == at::kBFloat16 || type == at::kHalf) return;
  throw Error(fmt::format("{}: {} has dtype {}", op, argument, c10::toString(type)),
              "supported: float32, float64, bfloat16, float16");
}

void check_dtype(const char* op, const char* argument, const at::Tensor& t, at::ScalarType expected) {
  if (t.scalar_type() == expected) return;
  throw Error(fmt::format("{}: {} has dtype {}", op, argument, c10::toString(t.scalar_type())),
              fmt::format("here it must be {}", c10::toString(expected)));
}

void check_dim(const char* op, const char* argument, const at::Tensor& t, int64_t dim, const char* layout) {
  if (t.dim() == dim) return;
  throw Error(fmt::format("{}: {} has shape {}", op, argument, shape_string(t.sizes())),
              fmt::format("its shape is {}", layout));
}

void check_shape(const char* op, const char* argument, const at::Tensor& t, at::IntArrayRef expected,
                 const char* layout) {
  if (t.sizes() == expected) return;
  throw Error(fmt::format("{}: {} has shape {}", op, argument, shape_string(t.sizes())),
              fmt::format("its shape is {}, here {}", layout, shape_string(expected)));
}

void check_device(const char* op, const char* argument, const at::Tensor& t, const char* other_argument,
                  const at::Tensor& other) {
  if (t.device() == other.device()) return;
  throw Error(
      fmt::format("{}: {} is on {}, {} on {}", op, argument, t.device().str(), other_argument, other.device().str()),
      "all tensors of a call must be on one device");
}

void check_cu_seqlens(const char* op, const at::Tensor& cu_seqlens, int64_t batch, int64_t length) {
  check_dim(op, "cu_seqlens", cu_seqlens, 1, "(N + 1,)");
  check_dtype(op, "cu_seqlens", cu_seqlens, at::kLong);
  if (batch != 1) {
    throw Error(fmt::format("{}: cu_seqlens needs a batch of 1, not {}", op, batch),
                "pack the documents one after another in one row");
  }
  if (!cu_seqlens.is_cpu()) return;
  const auto bounds = cu_seqlens.accessor<int64_t, 1>();
  const int64_t n = bounds.size(0);
  bool rises = n >= 2 && bounds[0] == 0 && bounds[n - 1] == length;
  for (int64_t i = 1; rises && i < n; ++i) rises = bounds[i - 1] <= bounds[i];
  if (!rises) {
    throw Error(fmt::format("{}: cu_seqlens does not rise from 0 to {}", op, length),
                "it holds the first token of each document and, at the end, the number of tokens");
  }
}

void check_seq_start(const char* op, const at::Tensor& seq_start, int64_t batch, int64_t length) {
  check_shape(op, "seq_start", seq_start, {batch}, "(B,)");
  check_dtype(op, "seq_start", seq_start, at::kLong);
  if (!seq_start.is_cpu()) return;
  const auto starts = seq_start.accessor<int64_t, 1>();
  for (int64_t b = 0; b < batch; ++b) {
    if (starts[b] < 0 || starts[b] > length) {
      throw Error(fmt::format("{}: seq_start[{}] is {}", op, b, starts[b]),
                  fmt::format("it is a number of padding tokens, 0 to {}", length));
    }
  }
}

}  // namespace fox::ops
