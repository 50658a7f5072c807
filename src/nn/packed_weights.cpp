#include "nn/packed_weights.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include <mutex>

namespace fox::nn {
namespace {

/// What tells one state of a weight from another: whoever writes to a tensor raises its version.
struct Seen {
  const void* data;
  int64_t version;
  bool operator==(const Seen&) const = default;
};

std::vector<Seen> look_at(const std::vector<at::Tensor>& weights) {
  std::vector<Seen> seen;
  for (const auto& weight : weights) seen.push_back({weight.const_data_ptr(), weight._version()});
  return seen;
}

bool fits(const at::Tensor& packed, const at::Tensor& like, int64_t rows, at::ScalarType dtype) {
  return packed.defined() && packed.device() == like.device() && packed.scalar_type() == dtype &&
         packed.size(0) == rows && packed.size(1) == like.size(1);
}

}  // namespace

void mark_changed(const at::Tensor& weight) { weight.unsafeGetTensorImpl()->bump_version(); }

struct PackedWeights::Memory {
  std::mutex mutex;
  at::Tensor packed;
  std::vector<Seen> seen;
};

PackedWeights::PackedWeights() : memory_(std::make_shared<Memory>()) {}

at::Tensor PackedWeights::get(const std::vector<at::Tensor>& weights, at::ScalarType dtype,
                              int64_t row_multiple) const {
  const auto& first = weights.front();
  if (weights.size() == 1 && first.scalar_type() == dtype && first.size(0) % row_multiple == 0) return first.detach();
  const std::lock_guard lock(memory_->mutex);
  const at::NoGradGuard no_grad;
  int64_t rows = 0;
  for (const auto& weight : weights) rows += weight.size(0);
  rows = (rows + row_multiple - 1) / row_multiple * row_multiple;
  auto& packed = memory_->packed;
  const bool reusable = fits(packed, first, rows, dtype);
  auto seen = look_at(weights);
  if (reusable && seen == memory_->seen) return packed;
  if (!reusable) packed = at::empty({rows, first.size(1)}, first.options().dtype(dtype).requires_grad(false));
  int64_t row = 0;
  for (const auto& weight : weights) {
    packed.narrow(0, row, weight.size(0)).copy_(weight);
    row += weight.size(0);
  }
  if (row < rows) packed.narrow(0, row, rows - row).zero_();
  memory_->seen = std::move(seen);
  return packed;
}

}  // namespace fox::nn
