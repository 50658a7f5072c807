#include "nn/short_conv.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "base/error.h"
#include "ops/dtypes.h"
#include "ops/previous_tokens.h"
#include "ops/recurrence.h"

namespace fox::nn {
namespace {

at::Tensor end_of_previous_chunk(const at::Tensor& x_BTC, int64_t tokens, const Sequence& sequence) {
  const int64_t length = x_BTC.size(1);
  if (length < tokens) {
    throw Error("a chunk of a split sequence is shorter than a convolution", "lower train.sequence_ranks");
  }
  return ops::previous_tokens(x_BTC.narrow(1, length - tokens, tokens), sequence.shard);
}

}  // namespace

ShortConv::ShortConv(int64_t channels, int64_t taps, bool with_bias)
    : weight(at::empty({channels, 1, taps}, at::kFloat)) {
  if (with_bias) bias = at::empty({channels}, at::kFloat);
}

at::Tensor ShortConv::forward(const at::Tensor& x_BTC, const Sequence& sequence, ShortConvTail* tail) const {
  const int64_t taps = weight.size(-1), length = x_BTC.size(1);
  const auto type = ops::compute_type(x_BTC.scalar_type());
  const auto x = ops::without_padding(ops::cast(x_BTC, type), sequence.padding_of(length));
  at::Tensor before = tail ? tail->inputs : at::Tensor();
  if (sequence.shard) before = end_of_previous_chunk(x, taps - 1, sequence);
  const bool continues = before.defined();
  if (!continues) before = at::zeros({x.size(0), taps - 1, x.size(2)}, x.options());
  const auto whole = at::cat({before, x}, 1);
  if (tail) tail->inputs = whole.narrow(1, length, taps - 1).clone();

  const auto w_KC = ops::cast(weight, type).squeeze(1).t();
  at::Tensor document_T;
  if (sequence.cu_seqlens) document_T = ops::document_numbers(sequence.cu_seqlens->to(x.device()), length);
  const auto y = x * w_KC[taps - 1];
  for (int64_t s = 1; s < std::min(taps, continues ? taps : length); ++s) {
    auto shifted = whole.narrow(1, taps - 1 - s, length);
    if (document_T.defined()) {
      const auto other = document_T.narrow(0, s, length - s) != document_T.narrow(0, 0, length - s);
      const auto outside = at::constant_pad_nd(other, {s, 0}, 1);  // there is nothing before the first token
      shifted = shifted.masked_fill(outside.view({1, length, 1}), 0.0);
    }
    y.addcmul_(shifted, w_KC[taps - 1 - s]);  // no gradient needs what y was before
  }
  if (bias.defined()) y.add_(ops::cast(bias, type));
  return ops::cast(y, x_BTC.scalar_type());
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
