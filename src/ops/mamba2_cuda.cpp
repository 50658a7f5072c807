#include "kernels/cuda/mamba2.h"

#include "ops/scan_cuda.h"

namespace fox::ops {
namespace {

// The kernels take bf16 values, heads of 64 channels and states of 64 or 128; everything else is computed by pieces.
bool has_kernel(at::TensorList inputs) {
  return inputs[0].scalar_type() == at::kBFloat16 && fits_grid(inputs[0]) &&
         cuda::mamba2_supported(inputs[0].size(3), inputs[3].size(2));
}

/// The tensors as the kernels read them; they must outlive the parameters.
struct Inputs {
  at::Tensor x, dt, log_decay, b, c, d, first;

  Inputs(at::TensorList inputs, const at::Tensor& first_in)
      : x(aligned_rows(inputs[0])),
        dt(dense(inputs[1])),
        log_decay(dense(inputs[2])),
        b(aligned_rows(cast(inputs[3], at::kBFloat16))),
        c(aligned_rows(cast(inputs[4], at::kBFloat16))),
        d(dense(inputs[5])),
        first(dense(first_in)) {}

  cuda::Mamba2Params params() const {
    return {.x = data<__nv_bfloat16>(x),
            .x_batch = x.stride(0),
            .x_time = x.stride(1),
            .x_head = x.stride(2),
            .b = data<__nv_bfloat16>(b),
            .c = data<__nv_bfloat16>(c),
            .b_batch = b.stride(0),
            .b_time = b.stride(1),
            .c_batch = c.stride(0),
            .c_time = c.stride(1),
            .dt = data<float>(dt),
            .log_decay = data<float>(log_decay),
            .d = data<float>(d),
            .first = data<float>(first),
            .batch = x.size(0),
            .length = x.size(1),
            .heads = x.size(2),
            .state_size = b.size(2)};
  }
};

ScanResult forward_cuda(at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
  if (!has_kernel(inputs)) return scan_in_pieces(kMamba2Scan, inputs, first, chunk_size);
  const c10::cuda::CUDAGuard guard(first.device());
  const Inputs in(inputs, first);
  const auto p = in.params();
  const auto y = empty_like_packed(in.x), last = empty_like_packed(first);
  const auto workspace = workspace_of(cuda::mamba2_workspace(p), first);
  check_launch("mamba2", cuda::mamba2_forward(p, mutable_data<__nv_bfloat16>(y), mutable_data<float>(last),
                                              workspace.mutable_data_ptr(), stream_of(first)));
  return {y, last, at::empty({0}, first.options())};
}

ScanGradients backward_cuda(const at::Tensor& d_y, const at::Tensor& dlast, at::TensorList inputs,
                            const at::Tensor& first, const at::Tensor& kept, int64_t chunk_size) {
  if (!has_kernel(inputs)) {
    return scan_in_pieces_backward(kMamba2Scan, d_y, dlast, inputs, first, kept, chunk_size);
  }
  const c10::cuda::CUDAGuard guard(first.device());
  const Inputs in(inputs, first);
  const auto p = in.params();
  const auto grad = dense(cast(d_y, at::kBFloat16)), grad_last = dense(dlast);
  const auto dx = empty_like_packed(in.x), ddt = empty_like_packed(in.dt), dlog_decay = empty_like_packed(in.dt);
  const auto dfirst = empty_like_packed(first);
  // Partial sums: b and c over groups of heads, d over chunks.
  const int64_t groups = (p.heads + cuda::kMamba2HeadGroup - 1) / cuda::kMamba2HeadGroup;
  const auto db = at::empty({groups, p.batch, p.length, p.state_size}, in.dt.options()), dc = at::empty_like(db);
  const auto dd = at::empty({p.batch * cuda::mamba2_chunks(p), p.heads}, in.dt.options());
  const auto workspace = workspace_of(cuda::mamba2_workspace(p), first);
  const cuda::Mamba2Gradients g{.dy = data<__nv_bfloat16>(grad),
                                .dlast = data<float>(grad_last),
                                .dx = mutable_data<__nv_bfloat16>(dx),
                                .ddt = mutable_data<float>(ddt),
                                .dlog_decay = mutable_data<float>(dlog_decay),
                                .db = mutable_data<float>(db),
                                .dc = mutable_data<float>(dc),
                                .dd = mutable_data<float>(dd),
                                .dfirst = mutable_data<float>(dfirst)};
  check_launch("mamba2_backward", cuda::mamba2_backward(p, g, workspace.mutable_data_ptr(), stream_of(first)));
  const auto sum = [](const at::Tensor& parts, at::ScalarType type) { return cast(parts.sum(0), type); };
  return {{dx, ddt, dlog_decay, sum(db, inputs[3].scalar_type()), sum(dc, inputs[4].scalar_type()),
           sum(dd, inputs[5].scalar_type())},
          dfirst};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("mamba2_scan", forward_cuda);
  m.impl("mamba2_scan_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
