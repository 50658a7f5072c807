#include "nn/short_conv.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "base/error.h"
#include "ops/previous_tokens.h"
#include "ops/recurrence.h"
#include "ops/short_conv.h"

namespace fox::nn {
namespace {

at::Tensor end_of_previous_chunk(const at::Tensor& x_BTC, int64_t tokens, const Sequence& sequence) {
  const int64_t length = x_BTC.size(1);
  if (length < tokens) {
    throw Error("a chunk of a split sequence is shorter than a convolution", "lower train.sequence_ranks");
  }
  return ops::previous_tokens(x_BTC.narrow(1, length - tokens, tokens), sequence.shard);
}

/// The last `tokens` inputs of `before` (or 0) and x together.
at::Tensor last_inputs(const std::optional<at::Tensor>& before, const at::Tensor& x_BTC, int64_t tokens) {
  const int64_t length = x_BTC.size(1);
  if (length >= tokens) return x_BTC.narrow(1, length - tokens, tokens).clone();
  const auto start = before ? *before : at::zeros({x_BTC.size(0), tokens, x_BTC.size(2)}, x_BTC.options());
  return at::cat({start.narrow(1, length, tokens - length), x_BTC}, 1);
}

}  // namespace

ShortConv::ShortConv(int64_t channels, int64_t taps, bool with_bias)
    : weight(at::empty({channels, 1, taps}, at::kFloat)) {
  if (with_bias) bias = at::empty({channels}, at::kFloat);
}

at::Tensor ShortConv::forward(const at::Tensor& x_BTC, const Sequence& sequence, ShortConvTail* tail) const {
  const int64_t past = weight.size(-1) - 1, length = x_BTC.size(1);
  const auto x = ops::without_padding(x_BTC, sequence.padding_of(length));
  std::optional<at::Tensor> before;
  if (tail && tail->inputs.defined()) before = tail->inputs;
  if (sequence.shard) before = end_of_previous_chunk(x, past, sequence);
  if (tail) tail->inputs = last_inputs(before, x, past);
  const auto with = bias.defined() ? std::optional(bias) : std::nullopt;
  return ops::short_conv(x, weight.squeeze(1).t(), with, before, sequence.cu_seqlens);
}

void ShortConv::init() {
  at::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(weight.size(-1)));
  weight.uniform_(-bound, bound);
  if (bias.defined()) bias.uniform_(-bound, bound);
}

void ShortConv::collect(const std::string& prefix, Parameters& out) const {
  out.push_back({prefix + "weight", weight, true});
  if (bias.defined()) out.push_back({prefix + "bias", bias, false});
}

}  // namespace fox::nn
