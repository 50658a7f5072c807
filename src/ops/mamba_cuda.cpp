#include "kernels/cuda/mamba.h"

#include "ops/scan_cuda.h"

namespace fox::ops {
namespace {

struct Mamba {
  static constexpr const ScanOp& kScan = kMambaScan;
  static constexpr auto forward = cuda::mamba_forward;
  static constexpr auto backward = cuda::mamba_backward;
  static int64_t workspace(const cuda::MambaParams& p, bool) { return cuda::mamba_workspace(p); }

  // The kernels take bf16 values and 16 states a channel; everything else is computed by pieces.
  static bool has_kernel(at::TensorList inputs) {
    return inputs[0].scalar_type() == at::kBFloat16 && cuda::mamba_supported(inputs[2].size(2)) &&
           inputs[0].size(0) < 65536 && inputs[0].size(1) < 64 * 65536;
  }

  static at::Tensor rows(const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

  struct Inputs {
    at::Tensor x, dt, b, c, starts, a, d, first;

    Inputs(at::TensorList inputs, const at::Tensor& first_in)
        : x(rows(inputs[0])),
          dt(dense(inputs[1])),
          b(rows(cast(inputs[2], at::kBFloat16))),
          c(rows(cast(inputs[3], at::kBFloat16))),
          starts(inputs[4].contiguous()),
          a(dense(inputs[5])),
          d(dense(inputs[6])),
          first(dense(first_in)) {}

    cuda::MambaParams params() const {
      return {.x = data<__nv_bfloat16>(x),
              .x_batch = x.stride(0),
              .x_time = x.stride(1),
              .b = data<__nv_bfloat16>(b),
              .c = data<__nv_bfloat16>(c),
              .b_batch = b.stride(0),
              .b_time = b.stride(1),
              .c_batch = c.stride(0),
              .c_time = c.stride(1),
              .dt = data<float>(dt),
              .a = data<float>(a),
              .d = data<float>(d),
              .starts = starts.size(1) > 0 ? data<bool>(starts) : nullptr,
              .first = data<float>(first),
              .batch = x.size(0),
              .length = x.size(1),
              .channels = x.size(2)};
    }
    const at::Tensor& values() const { return x; }
  };

  using Gradients = cuda::MambaGradients;
  static auto gradients(const Inputs& in, at::TensorList inputs, const __nv_bfloat16* dy, Gradients& g) {
    const auto p = in.params();
    const int64_t blocks = (p.channels + cuda::kMambaChannelBlock - 1) / cuda::kMambaChannelBlock;
    const int64_t chunks = p.batch * cuda::mamba_chunks(p);
    const auto dx = empty_like_packed(in.x), ddt = empty_like_packed(in.dt);
    // Partial sums: b and c over blocks of channels, a and d over chunks.
    const auto dbc = at::empty({blocks, p.batch, p.length, 2 * cuda::kMambaStates}, in.dt.options());
    const auto da = at::empty({chunks, p.channels, cuda::kMambaStates}, in.dt.options());
    const auto dd = at::empty({chunks, p.channels}, in.dt.options());
    g.dy = dy, g.dx = mutable_data<__nv_bfloat16>(dx), g.ddt = mutable_data<float>(ddt);
    g.dbc = mutable_data<float>(dbc), g.da = mutable_data<float>(da), g.dd = mutable_data<float>(dd);
    return [=]() -> std::vector<at::Tensor> {
      const auto db_and_dc = dbc.sum(0).chunk(2, -1);
      return {dx,
              ddt,
              cast(db_and_dc[0], inputs[2].scalar_type()),
              cast(db_and_dc[1], inputs[3].scalar_type()),
              empty_like_packed(inputs[4]),
              da.sum(0),
              dd.sum(0)};
    };
  }
};

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("mamba_scan", CudaScan<Mamba>::forward);
  m.impl("mamba_scan_backward", CudaScan<Mamba>::backward);
}

}  // namespace
}  // namespace fox::ops
