#include "nn/embedding.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <fmt/format.h>

#include "base/error.h"

namespace fox::nn {
namespace {

// Reading a CUDA tensor back would stall the device: there the kernel's own assertion has to do.
void check_ids(const at::Tensor& ids, int64_t vocab_size) {
  if (ids.scalar_type() != at::kLong) {
    throw Error(fmt::format("embedding: ids has dtype {}", c10::toString(ids.scalar_type())), "token ids are int64");
  }
  if (!ids.is_cpu() || ids.numel() == 0) return;
  const auto [low, high] = at::aminmax(ids);
  const int64_t worst = low.item<int64_t>() < 0 ? low.item<int64_t>() : high.item<int64_t>();
  if (worst < 0 || worst >= vocab_size) {
    throw Error(fmt::format("embedding: token id {} is outside the vocabulary of {}", worst, vocab_size),
                "the text was tokenized for another model, or vocab_size is too small");
  }
}

}  // namespace

Embedding::Embedding(int64_t vocab_size, int64_t width) : weight(at::empty({vocab_size, width}, at::kFloat)) {}

at::Tensor Embedding::forward(const at::Tensor& ids) const {
  check_ids(ids, weight.size(0));
  return at::embedding(weight, ids);
}

void Embedding::init(double std) {
  at::NoGradGuard no_grad;
  weight.normal_(0, std);
}

void Embedding::collect(const std::string& prefix, Parameters& out) const {
  out.push_back({prefix + "weight", weight, true});
}

}  // namespace fox::nn
