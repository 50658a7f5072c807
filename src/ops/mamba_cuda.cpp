#include "kernels/cuda/mamba.h"

#include "ops/scan_cuda.h"

namespace fox::ops {
namespace {

// The kernels take bf16 values and 16 states a channel; everything else is computed by pieces.
bool has_kernel(at::TensorList inputs) {
  return inputs[0].scalar_type() == at::kBFloat16 && cuda::mamba_supported(inputs[2].size(2)) &&
         inputs[0].size(0) < 65536 && inputs[0].size(1) < 64 * 65536;
}

at::Tensor rows(const at::Tensor& x) { return x.stride(2) == 1 ? x : x.contiguous(); }

/// The tensors as the kernels read them; they must outlive the parameters.
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
};

ScanResult forward_cuda(at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
  if (!has_kernel(inputs)) return scan_in_pieces(kMambaScan, inputs, first, chunk_size);
  const c10::cuda::CUDAGuard guard(first.device());
  const Inputs in(inputs, first);
  const auto p = in.params();
  const auto y = empty_like_packed(in.x), last = empty_like_packed(first);
  const auto workspace = workspace_of(cuda::mamba_workspace(p), first);
  check_launch("mamba", cuda::mamba_forward(p, mutable_data<__nv_bfloat16>(y), mutable_data<float>(last),
                                            workspace.mutable_data_ptr(), stream_of(first)));
  return {y, last, at::empty({0}, first.options())};
}

ScanGradients backward_cuda(const at::Tensor& d_y, const at::Tensor& dlast, at::TensorList inputs,
                            const at::Tensor& first, const at::Tensor& kept, int64_t chunk_size) {
  if (!has_kernel(inputs)) {
    return scan_in_pieces_backward(kMambaScan, d_y, dlast, inputs, first, kept, chunk_size);
  }
  const c10::cuda::CUDAGuard guard(first.device());
  const Inputs in(inputs, first);
  const auto p = in.params();
  const auto grad = dense(cast(d_y, at::kBFloat16)), grad_last = dense(dlast);
  const auto dx = empty_like_packed(in.x), ddt = empty_like_packed(in.dt), dfirst = empty_like_packed(first);
  // Partial sums: b and c over blocks of channels, a and d over chunks.
  const int64_t blocks = (p.channels + cuda::kMambaChannelBlock - 1) / cuda::kMambaChannelBlock;
  const int64_t chunks = p.batch * cuda::mamba_chunks(p);
  const auto dbc = at::empty({blocks, p.batch, p.length, 2 * cuda::kMambaStates}, first.options());
  const auto da = at::empty({chunks, p.channels, cuda::kMambaStates}, first.options());
  const auto dd = at::empty({chunks, p.channels}, first.options());
  const auto workspace = workspace_of(cuda::mamba_workspace(p), first);
  const cuda::MambaGradients g{.dy = data<__nv_bfloat16>(grad),
                               .dlast = data<float>(grad_last),
                               .dx = mutable_data<__nv_bfloat16>(dx),
                               .ddt = mutable_data<float>(ddt),
                               .dbc = mutable_data<float>(dbc),
                               .da = mutable_data<float>(da),
                               .dd = mutable_data<float>(dd),
                               .dfirst = mutable_data<float>(dfirst)};
  check_launch("mamba_backward", cuda::mamba_backward(p, g, workspace.mutable_data_ptr(), stream_of(first)));
  const auto db_and_dc = dbc.sum(0).chunk(2, -1);
  return {{dx, ddt, cast(db_and_dc[0], inputs[2].scalar_type()), cast(db_and_dc[1], inputs[3].scalar_type()),
           empty_like_packed(inputs[4]), da.sum(0), dd.sum(0)},
          dfirst};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("mamba_scan", forward_cuda);
  m.impl("mamba_scan_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
