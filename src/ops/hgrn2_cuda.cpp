#include "kernels/cuda/hgrn2.h"

#include "ops/scan_cuda.h"

namespace fox::ops {
namespace {

struct Hgrn2 {
  static constexpr const ScanOp& kScan = kHgrn2Scan;
  static constexpr auto forward = cuda::hgrn2_forward;
  static constexpr auto backward = cuda::hgrn2_backward;
  static int64_t workspace(const cuda::Hgrn2Params& p, bool) { return cuda::hgrn2_workspace(p); }

  // The kernels take bf16 values and head sizes of 64 and 128; everything else is computed by pieces.
  static bool has_kernel(at::TensorList inputs) {
    return inputs[2].scalar_type() == at::kBFloat16 && fits_grid(inputs[2]) &&
           cuda::hgrn2_supported(inputs[0].size(3), inputs[2].size(3));
  }

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
    const at::Tensor& values() const { return v; }
  };

  using Gradients = cuda::Hgrn2Gradients;
  static auto gradients(const Inputs& in, at::TensorList inputs, const __nv_bfloat16* d_o, Gradients& g) {
    const auto with_qkv = qkv_gradients(in, inputs, d_o, g);
    const auto dlog_g = empty_like_packed(in.log_g);
    g.dlog_g = mutable_data<float>(dlog_g);
    return [=] { return with_qkv({dlog_g}); };
  }
};

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("hgrn2_scan", CudaScan<Hgrn2>::forward);
  m.impl("hgrn2_scan_backward", CudaScan<Hgrn2>::backward);
}

}  // namespace
}  // namespace fox::ops
