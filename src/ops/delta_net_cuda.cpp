#include "kernels/cuda/delta_net.h"

#include "ops/scan_cuda.h"

namespace fox::ops {
namespace {

struct DeltaNet {
  static constexpr const ScanOp& kScan = kDeltaNetScan;
  static constexpr auto forward = cuda::delta_net_forward;
  static constexpr auto backward = cuda::delta_net_backward;
  static constexpr auto workspace = cuda::delta_net_workspace;

  // The kernels take bf16 values and head sizes of 64 and 128; everything else is computed by pieces.
  static bool has_kernel(at::TensorList inputs) {
    return inputs[2].scalar_type() == at::kBFloat16 && fits_grid(inputs[2]) &&
           cuda::delta_net_supported(inputs[0].size(3), inputs[2].size(3));
  }

  struct Inputs {
    at::Tensor q, k, v, beta, starts, first;

    Inputs(at::TensorList inputs, const at::Tensor& first_in)
        : q(aligned_rows(cast(inputs[0], at::kBFloat16))),
          k(aligned_rows(cast(inputs[1], at::kBFloat16))),
          v(aligned_rows(inputs[2])),
          beta(dense(inputs[3])),
          starts(inputs[4].contiguous()),
          first(dense(first_in)) {}

    cuda::DeltaNetParams params() const {
      return {.q = head_tensor<__nv_bfloat16>(q),
              .k = head_tensor<__nv_bfloat16>(k),
              .v = head_tensor<__nv_bfloat16>(v),
              .beta = data<float>(beta),
              .starts = starts.size(1) > 0 ? data<bool>(starts) : nullptr,
              .first = data<float>(first),
              .batch = q.size(0),
              .length = q.size(1),
              .heads = q.size(2),
              .dim = q.size(3)};
    }
    const at::Tensor& values() const { return v; }
  };

  using Gradients = cuda::DeltaNetGradients;
  static auto gradients(const Inputs& in, at::TensorList inputs, const __nv_bfloat16* d_o, Gradients& g) {
    const auto with_qkv = qkv_gradients(in, inputs, d_o, g);
    const auto dbeta = empty_like_packed(in.beta);
    g.dbeta = mutable_data<float>(dbeta);
    return [=] { return with_qkv({dbeta, empty_like_packed(inputs[4])}); };
  }
};

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("delta_net_scan", CudaScan<DeltaNet>::forward);
  m.impl("delta_net_scan_backward", CudaScan<DeltaNet>::backward);
}

}  // namespace
}  // namespace fox::ops
