#include <algorithm>

#include "kernels/cuda/softmax_xent.h"
#include "ops/cuda_common.h"

namespace fox::ops {
namespace {

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Gradients = std::tuple<at::Tensor, at::Tensor>;
using Forward = Results(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&, bool, bool);

/// Rows of logits that exist at once: a quarter of a GiB, thousands of rows even for a vocabulary of 50,304. Chunks are
/// of one size, so that no small one at the end leaves the GPU half empty.
int64_t chunk_rows(int64_t rows, int64_t vocab, int64_t element_size) {
  constexpr int64_t kBytes = int64_t{1} << 28, kTile = 128;
  const int64_t most = std::max(kBytes / (vocab * element_size) / kTile * kTile, kTile);
  const int64_t chunks = std::max<int64_t>((rows + most - 1) / most, 1);
  return ((rows + chunks - 1) / chunks + kTile - 1) / kTile * kTile;
}

/// 1 / (number of labels that count) for each, without asking the GPU how many that is.
at::Tensor mean_weight(const at::Tensor& labels, at::ScalarType type) {
  const auto count = (labels != -100).sum().clamp_min(1).to(type);
  return count.reciprocal().expand(labels.sizes()).contiguous();
}

/// `rows` rows in `type`: those of w, then zeros.
at::Tensor padded_weight(const at::Tensor& w, int64_t rows, at::ScalarType type) {
  if (w.size(0) == rows) return cast(w, type);
  auto padded = at::empty({rows, w.size(1)}, w.options().dtype(type));
  padded.narrow(0, 0, w.size(0)).copy_(w);
  padded.narrow(0, w.size(0), rows - w.size(0)).zero_();
  return padded;
}

Results forward_cuda(const at::Tensor& x, const at::Tensor& w_in, const at::Tensor& labels_in,
                     const OptionalTensor& token_weight, bool want_dx, bool want_dw) {
  static const auto op = find_operator<Forward>("fox::linear_cross_entropy");
  const c10::cuda::CUDAGuard guard(x.device());
  // dw is made at the end, from its float32 sum.
  auto [total, loss, dx, no_dw] = checked_results(op, x, w_in, labels_in, token_weight, want_dx, false);
  // cuBLAS is 6 times slower where a size is odd, as GPT-2's vocabulary of 50,257 is. The words that fill it up have
  // logits 0, which the softmax does not look at and which stay 0 as gradients.
  const int64_t rows = x.size(0), vocab = w_in.size(0), stride = (vocab + 63) / 64 * 64;
  const auto w = padded_weight(w_in, stride, x.scalar_type()), labels = labels_in.contiguous();
  const auto accumulate = compute_type(x.scalar_type());
  const auto weight = token_weight ? cast(*token_weight, accumulate).contiguous() : mean_weight(labels, accumulate);
  const int64_t chunk = chunk_rows(rows, vocab, x.element_size());
  const auto buffer = at::empty({std::min(chunk, rows), stride}, x.options());
  // Chunks are added up in float32: bf16 sums of a few chunks would lose the digits of rare words.
  const at::Tensor dw_sum = want_dw ? at::zeros(w.sizes(), x.options().dtype(accumulate)) : at::Tensor();
  for (int64_t begin = 0; begin < rows; begin += chunk) {
    const int64_t n = std::min(chunk, rows - begin);
    const auto x_chunk = x.narrow(0, begin, n);
    auto logits = buffer.narrow(0, 0, n);
    at::mm_out(logits, x_chunk, w.t());
    dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
      const cuda::SoftmaxXentParams<T, A> p{.logits = mutable_data<T>(logits),
                                            .logits_stride = stride,
                                            .labels = data<int64_t>(labels) + begin,
                                            .weight = data<A>(weight) + begin,
                                            .rows = n,
                                            .vocab = vocab,
                                            .gradient = want_dx || want_dw};
      check_launch("linear_cross_entropy", cuda::softmax_xent(p, mutable_data<A>(loss) + begin, stream_of(x)));
    });
    if (want_dx) {
      auto dx_chunk = dx.narrow(0, begin, n);
      at::mm_out(dx_chunk, logits, w);
    }
    if (!want_dw) continue;
    auto sum = dw_sum;
    if (accumulate == x.scalar_type()) {
      at::addmm_out(sum, dw_sum, logits.t(), x_chunk);
    } else {
      at::addmm_out(sum, dw_sum, logits.t(), x_chunk, accumulate);
    }
  }
  return {(loss * weight).sum(), loss, dx, want_dw ? cast(dw_sum.narrow(0, 0, vocab), w_in.scalar_type()) : dw_sum};
}

Gradients backward_cuda(const at::Tensor& dtotal, const at::Tensor&, const at::Tensor&, const at::Tensor& dx,
                        const at::Tensor& dw) {
  const auto scaled = [&](const at::Tensor& t) { return t.defined() ? t * dtotal.to(t.scalar_type()) : t; };
  return {scaled(dx), scaled(dw)};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("linear_cross_entropy", forward_cuda);
  m.impl("linear_cross_entropy_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
