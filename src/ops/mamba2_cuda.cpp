#include "kernels/cuda/mamba2.h"

#include "ops/scan_cuda.h"

namespace fox::ops {
namespace {

struct Mamba2 {
  static constexpr const ScanOp& kScan = kMamba2Scan;
  static constexpr auto forward = cuda::mamba2_forward;
  static constexpr auto backward = cuda::mamba2_backward;
  static int64_t workspace(const cuda::Mamba2Params& p, bool) { return cuda::mamba2_workspace(p); }

  // The kernels take bf16 values, heads of 64 channels and states of 64 or 128; everything else is computed by pieces.
  static bool has_kernel(at::TensorList inputs) {
    return inputs[0].scalar_type() == at::kBFloat16 && fits_grid(inputs[0]) &&
           cuda::mamba2_supported(inputs[0].size(3), inputs[3].size(2));
  }

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
      const auto shared = [](const at::Tensor& bc_BTN) {
        return cuda::HeadTensor<__nv_bfloat16>{data<__nv_bfloat16>(bc_BTN), bc_BTN.stride(0), bc_BTN.stride(1), 0};
      };
      return {.x = head_tensor<__nv_bfloat16>(x),
              .b = shared(b),
              .c = shared(c),
              .dt = data<float>(dt),
              .log_decay = data<float>(log_decay),
              .d = data<float>(d),
              .first = data<float>(first),
              .batch = x.size(0),
              .length = x.size(1),
              .heads = x.size(2),
              .state_size = b.size(2)};
    }
    const at::Tensor& values() const { return x; }
  };

  using Gradients = cuda::Mamba2Gradients;
  static auto gradients(const Inputs& in, at::TensorList inputs, const __nv_bfloat16* dy, Gradients& g) {
    const auto p = in.params();
    const int64_t groups = (p.heads + cuda::kMamba2HeadGroup - 1) / cuda::kMamba2HeadGroup;
    const auto dx = empty_like_packed(in.x), ddt = empty_like_packed(in.dt), dlog_decay = empty_like_packed(in.dt);
    // Partial sums: b and c over groups of heads, d over chunks.
    const auto db = at::empty({groups, p.batch, p.length, p.state_size}, in.dt.options()), dc = at::empty_like(db);
    const auto dd = at::empty({p.batch * cuda::mamba2_chunks(p), p.heads}, in.dt.options());
    g.dy = dy, g.dx = mutable_data<__nv_bfloat16>(dx), g.ddt = mutable_data<float>(ddt);
    g.dlog_decay = mutable_data<float>(dlog_decay), g.dd = mutable_data<float>(dd);
    g.db = mutable_data<float>(db), g.dc = mutable_data<float>(dc);
    return [=]() -> std::vector<at::Tensor> {
      const auto sum = [&](const at::Tensor& parts, size_t i) { return cast(parts.sum(0), inputs[i].scalar_type()); };
      return {dx, ddt, dlog_decay, sum(db, 3), sum(dc, 4), sum(dd, 5)};
    };
  }
};

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("mamba2_scan", CudaScan<Mamba2>::forward);
  m.impl("mamba2_scan_backward", CudaScan<Mamba2>::backward);
}

}  // namespace
}  // namespace fox::ops
