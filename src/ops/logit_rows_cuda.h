#pragma once

#include "kernels/cuda/logit_rows.h"
#include "ops/cuda_common.h"

namespace fox::ops {

/// Logits, and one more number for each channel, as kernels read them; it must outlive params().
struct LogitRowsCall {
  Rows logits;
  at::Tensor per_channel;

  LogitRowsCall(const at::Tensor& logits_in, const OptionalTensor& per_channel_in) : logits(as_rows(logits_in)) {
    if (per_channel_in) per_channel = packed(cast(*per_channel_in, compute_type(logits_in.scalar_type())));
  }
  template <class T, class A>
  cuda::LogitRows<T, A> params() const {
    return {.logits = data<T>(logits.tensor),
            .stride = logits.stride,
            .per_channel = data<A>(per_channel),
            .rows = logits.rows,
            .channels = logits.width};
  }
  /// Room for the partial sums of per_channel's gradient; undefined without it.
  at::Tensor partials() const {
    if (!per_channel.defined()) return {};
    return at::empty({cuda::logit_row_partials(logits.rows), logits.width}, per_channel.options());
  }
};

}  // namespace fox::ops
