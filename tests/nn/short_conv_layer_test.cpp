#include "nn/short_conv.h"

#include <fmt/format.h>

#include "support/errors.h"
#include "support/op_check.h"

namespace fox::nn {
namespace {

at::Tensor by_conv1d(const ShortConv& conv, const at::Tensor& x_BTC) {
  const int64_t taps = conv.weight.size(-1);
  const auto padded = at::constant_pad_nd(x_BTC.transpose(1, 2), {taps - 1, 0});
  const auto bias = conv.bias.defined() ? std::optional(conv.bias) : std::nullopt;
  return at::silu(at::conv1d(padded, conv.weight, bias, 1, at::IntArrayRef{0}, 1, x_BTC.size(2))).transpose(1, 2);
}

ShortConv make_conv(int64_t taps, bool with_bias) {
  at::manual_seed(taps);
  ShortConv conv(6, taps, with_bias);
  conv.init();
  conv.weight = conv.weight.to(at::kDouble);
  if (with_bias) conv.bias = conv.bias.to(at::kDouble);
  return conv;
}

TEST(ShortConvLayer, IsADepthwiseCausalConvolutionWithSilu) {
  for (const int64_t taps : {1, 2, 4}) {
    for (const int64_t length : {1, 2, 3, 20}) {
      const auto conv = make_conv(taps, taps == 4);
      const auto x = at::randn({2, length, 6}, at::kDouble);
      test::expect_close(conv.forward(x, {}, nullptr), by_conv1d(conv, x), 1e-14, 0, fmt::format("{} taps", taps));
    }
  }
}

TEST(ShortConvLayer, PiecesContinue) {
  for (const int64_t taps : {1, 4}) {
    const auto conv = make_conv(taps, true);
    const auto x = at::randn({2, 13, 6}, at::kDouble);
    ShortConvTail tail;
    std::vector<at::Tensor> parts;
    int64_t at = 0;
    for (const int64_t size : {1, 1, 5, 1, 2, 3}) {
      parts.push_back(conv.forward(x.narrow(1, at, size), {}, &tail));
      at += size;
    }
    test::expect_close(at::cat(parts, 1), conv.forward(x, {}, nullptr), 1e-14, 0, "pieces");
  }
}

TEST(ShortConvLayer, StopsAtDocumentsAndPadding) {
  const auto conv = make_conv(4, false);
  const auto x = at::randn({1, 12, 6}, at::kDouble);
  Sequence packed;
  packed.cu_seqlens = at::tensor({0, 2, 2, 3, 9, 12}, at::kLong);
  const auto together = conv.forward(x, packed, nullptr);
  for (const auto& [first, last] : std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {2, 3}, {3, 9}, {9, 12}}) {
    test::expect_close(together.narrow(1, first, last - first),
                       conv.forward(x.narrow(1, first, last - first), {}, nullptr), 1e-14, 0, "document");
  }
  Sequence padded;
  padded.seq_start = at::tensor({5}, at::kLong);
  const auto dirty = at::cat({at::full({1, 5, 6}, NAN, at::kDouble), x}, 1);
  test::expect_close(conv.forward(dirty, padded, nullptr).narrow(1, 5, 12), conv.forward(x, {}, nullptr), 1e-14, 0,
                     "padding");
}

TEST(ShortConvLayer, InitialisesAsPyTorchDoes) {
  at::manual_seed(4);
  ShortConv conv(5000, 4, true);
  conv.init();
  for (const auto& x : {conv.weight, conv.bias}) {
    EXPECT_LE(x.abs().max().item<double>(), 0.5);
    EXPECT_NEAR(x.std().item<double>(), 0.5 / std::sqrt(3.0), 0.02);
  }
}

}  // namespace
}  // namespace fox::nn
