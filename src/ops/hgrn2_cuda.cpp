#include "kernels/cuda/hgrn2.h"

#include "ops/scan_cuda.h"

namespace fox::ops {
namespace {

// The kernels take bf16 values and head sizes of 64 and 128; everything else is computed by pieces.
bool has_kernel(at::TensorList inputs) {
  return inputs[2].scalar_type() == at::kBFloat16 && fits_grid(inputs[2]) &&
         cuda::hgrn2_supported(inputs[0].size(3), inputs[2].size(3));
}

/// The tensors as the kernels read them; they must outlive the parameters.
struct Inputs {
  at::Tensor q, k, v, log_g, first;

  Inputs(at::TensorList inputs, const at::Tensor& first_in)
      : q(aligned_rows(cast(inputs[0], at::kBFloat16))),
        k(aligned_rows(cast(inputs[1], at::kBFloat16))),
        v(aligned_rows(inputs[2])),
        log_g(aligned_rows(inputs[3])),
        first(dense(first_in)) {}

  cuda::Hgrn2Params params() const {
    return {.q = head_tensor<__nv_bfloat16>(q),
            .k = head_tensor<__nv_bfloat16>(k),
            .v = head_tensor<__nv_bfloat16>(v),
            .log_g = head_tensor<float>(log_g),
            .first = data<float>(first),
            .batch = q.size(0),
            .length = q.size(1),
            .heads = q.size(2),
            .dim = q.size(3)};
  }
};

ScanResult forward_cuda(at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
  if (!has_kernel(inputs)) return scan_in_pieces(kHgrn2Scan, inputs, first, chunk_size);
  const c10::cuda::CUDAGuard guard(first.device());
  const Inputs in(inputs, first);
  const auto p = in.params();
  const auto o = empty_like_packed(in.v), last = empty_like_packed(first);
  const auto workspace = workspace_of(cuda::hgrn2_workspace(p), first);
  check_launch("hgrn2", cuda::hgrn2_forward(p, mutable_data<__nv_bfloat16>(o), mutable_data<float>(last),
                                            workspace.mutable_data_ptr(), stream_of(first)));
  return {o, last, at::empty({0}, first.options())};
}

ScanGradients backward_cuda(const at::Tensor& d_o, const at::Tensor& dlast, at::TensorList inputs,
                            const at::Tensor& first, const at::Tensor& kept, int64_t chunk_size) {
  if (!has_kernel(inputs)) {
    return scan_in_pieces_backward(kHgrn2Scan, d_o, dlast, inputs, first, kept, chunk_size);
  }
  const c10::cuda::CUDAGuard guard(first.device());
  const Inputs in(inputs, first);
  const auto p = in.params();
  const auto grad = dense(cast(d_o, at::kBFloat16)), grad_last = dense(dlast);
  const auto dq = empty_like_packed(in.q), dk = empty_like_packed(in.k), dv = empty_like_packed(in.v);
  const auto dlog_g = empty_like_packed(in.log_g), dfirst = empty_like_packed(first);
  const auto workspace = workspace_of(cuda::hgrn2_workspace(p), first);
  const cuda::Hgrn2Gradients g{.d_o = data<__nv_bfloat16>(grad),
                               .dlast = data<float>(grad_last),
                               .dq = mutable_data<__nv_bfloat16>(dq),
                               .dk = mutable_data<__nv_bfloat16>(dk),
                               .dv = mutable_data<__nv_bfloat16>(dv),
                               .dlog_g = mutable_data<float>(dlog_g),
                               .dfirst = mutable_data<float>(dfirst)};
  check_launch("hgrn2_backward", cuda::hgrn2_backward(p, g, workspace.mutable_data_ptr(), stream_of(first)));
  return {{cast(dq, inputs[0].scalar_type()), cast(dk, inputs[1].scalar_type()), dv, dlog_g}, dfirst};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("hgrn2_scan", forward_cuda);
  m.impl("hgrn2_scan_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
