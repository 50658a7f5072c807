#pragma once

#include "kernels/cuda/head_tensor.h"
#include "ops/cuda_common.h"
#include "ops/scan_op.h"

/// What the CUDA sides of the recurrences share.
namespace fox::ops {

/// The tensor, or a copy where it is not contiguous from a 16-byte boundary on.
inline at::Tensor dense(const at::Tensor& t) {
  const auto contiguous = t.contiguous();
  return reinterpret_cast<uintptr_t>(contiguous.const_data_ptr()) % 16 == 0 ? contiguous : contiguous.clone();
}

/// x (..., D) as the kernels read it, start, strides and last dimension fit for 16-byte copies: itself, or a copy.
inline at::Tensor aligned_rows(const at::Tensor& x) {
  const auto item = x.element_size();
  bool fits = x.stride(-1) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) fits = fits && (x.size(i) == 1 || x.stride(i) * item % 16 == 0);
  return fits ? x : dense(x);
}

/// x (B, T, H, D).
template <class T>
cuda::HeadTensor<T> head_tensor(const at::Tensor& x) {
  return {.data = data<T>(x), .batch = x.stride(0), .time = x.stride(1), .head = x.stride(2)};
}

inline at::Tensor empty_like_packed(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }
inline at::Tensor workspace_of(int64_t bytes, const at::Tensor& like) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

/// Makes room for the gradients of the first three inputs q, k and v, which the kernels take in bf16, in g, and returns
/// what puts them together with those of the other inputs.
template <class Inputs, class Gradients>
auto qkv_gradients(const Inputs& in, at::TensorList inputs, const __nv_bfloat16* d_o, Gradients& g) {
  const auto dq = empty_like_packed(in.q), dk = empty_like_packed(in.k), dv = empty_like_packed(in.v);
  g.d_o = d_o, g.dq = mutable_data<__nv_bfloat16>(dq), g.dk = mutable_data<__nv_bfloat16>(dk);
  g.dv = mutable_data<__nv_bfloat16>(dv);
  return [=](std::initializer_list<at::Tensor> others) {
    std::vector<at::Tensor> all{cast(dq, inputs[0].scalar_type()), cast(dk, inputs[1].scalar_type()), dv};
    all.insert(all.end(), others);
    return all;
  };
}

/// Batch and heads are a dimension of the kernels' grids.
inline bool fits_grid(const at::Tensor& x_BTH) { return x_BTH.size(0) * x_BTH.size(2) < 65536; }

/// A recurrence on CUDA, made of what differs from one to the next:
///   kScan                  the operator; what has no kernel goes through its pieces
///   has_kernel(inputs)
///   Inputs(inputs, first)  the tensors as the kernels read them; they must outlive params(). values() has o's shape
///   Gradients, gradients(in, inputs, d_o, g)
///                          makes room for the inputs' gradients in g and returns what puts them together as the
///                          operator returns them, once they are there
///   workspace(p, backward), forward(p, o, last, workspace, stream), backward(p, g, workspace, stream)
template <class Kernels>
struct CudaScan {
  static ScanResult forward(at::TensorList inputs, const at::Tensor& first, int64_t chunk_size) {
    if (!Kernels::has_kernel(inputs)) return scan_in_pieces(Kernels::kScan, inputs, first, chunk_size);
    const c10::cuda::CUDAGuard guard(first.device());
    const typename Kernels::Inputs in(inputs, first);
    const auto p = in.params();
    const auto o = empty_like_packed(in.values()), last = empty_like_packed(first);
    const auto workspace = workspace_of(Kernels::workspace(p, /*backward=*/false), first);
    check_launch(Kernels::kScan.name, Kernels::forward(p, mutable_data<__nv_bfloat16>(o), mutable_data<float>(last),
                                                       workspace.mutable_data_ptr(), stream_of(first)));
    return {o, last, at::empty({0}, first.options())};
  }

  static ScanGradients backward(const at::Tensor& d_o, const at::Tensor& dlast, at::TensorList inputs,
                                const at::Tensor& first, const at::Tensor& kept, int64_t chunk_size) {
    if (!Kernels::has_kernel(inputs)) {
      return scan_in_pieces_backward(Kernels::kScan, d_o, dlast, inputs, first, kept, chunk_size);
    }
    const c10::cuda::CUDAGuard guard(first.device());
    const typename Kernels::Inputs in(inputs, first);
    const auto p = in.params();
    const auto grad = dense(cast(d_o, at::kBFloat16)), grad_last = dense(dlast), dfirst = empty_like_packed(first);
    typename Kernels::Gradients g{};
    g.dlast = data<float>(grad_last), g.dfirst = mutable_data<float>(dfirst);
    const auto results = Kernels::gradients(in, inputs, data<__nv_bfloat16>(grad), g);
    const auto workspace = workspace_of(Kernels::workspace(p, /*backward=*/true), first);
    check_launch(Kernels::kScan.backward, Kernels::backward(p, g, workspace.mutable_data_ptr(), stream_of(first)));
    return {results(), dfirst};
  }
};

}  // namespace fox::ops
