#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <type_traits>
#include <utility>

#include "base/error.h"
#include "kernels/cuda/sum_rows.h"
#include "ops/common.h"

/// What the operators' CUDA sides share (files *_cuda.cpp, compiled into libfox_cuda.so only).
namespace fox::ops {

/// The kernels' name of an ATen dtype.
template <class T>
struct CudaType {
  using type = T;
};
template <>
struct CudaType<at::BFloat16> {
  using type = __nv_bfloat16;
};
template <>
struct CudaType<at::Half> {
  using type = __half;
};

/// Calls f.template operator()<T, A>() with T the kernels' type of `type` and A the one they compute in.
template <class F>
void dispatch_cuda(at::ScalarType type, const F& f) {
  switch (type) {
    case at::kBFloat16:
      return f.template operator()<__nv_bfloat16, float>();
    case at::kHalf:
      return f.template operator()<__half, float>();
    case at::kDouble:
      return f.template operator()<double, double>();
    default:
      return f.template operator()<float, float>();
  }
}

template <class T>
const T* data(const at::Tensor& t) {
  return t.defined() ? static_cast<const T*>(t.const_data_ptr()) : nullptr;
}
template <class T>
T* mutable_data(const at::Tensor& t) {
  return t.defined() ? static_cast<T*>(t.mutable_data_ptr()) : nullptr;
}

/// The tensor, or a copy where it is not contiguous from a 16-byte boundary on: how kernels take gradients.
inline at::Tensor packed(const at::Tensor& t) {
  const auto dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

inline cudaStream_t stream_of(const at::Tensor& t) { return c10::cuda::getCurrentCUDAStream(t.device().index()); }

inline void check_launch(const char* op, cudaError_t error) {
  if (error != cudaSuccess) throw Error(fmt::format("{}: CUDA: {}", op, cudaGetErrorString(error)));
}

/// The sum over rows of the partial sums (rows × columns, contiguous, in the dtype of the computation) that a kernel of
/// `op` has left.
inline at::Tensor sum_of_rows(const char* op, const at::Tensor& partials) {
  const int64_t rows = partials.size(0), columns = partials.size(1);
  const auto sum = at::empty({columns}, partials.options());
  dispatch_real(partials.scalar_type(), [&]<class A>() {
    check_launch(op, cuda::sum_rows(data<A>(partials), rows, columns, mutable_data<A>(sum), stream_of(sum)));
  });
  return sum;
}

/// Checks the arguments of operator `name` and allocates its results: that is what its Meta kernel does, on whatever
/// device the arguments are.
template <class Result, class... Args>
Result checked_results(const c10::TypedOperatorHandle<Result(Args...)>& op, std::type_identity_t<Args>... args) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::Meta), std::forward<Args>(args)...);
}

/// Results of operator `name` from its CPU kernel, for operators whose CPU side is a composition of other operators and
/// so computes on whatever device the arguments are.
template <class Result, class... Args>
Result composed_results(const c10::TypedOperatorHandle<Result(Args...)>& op, std::type_identity_t<Args>... args) {
  return op.redispatch(c10::DispatchKeySet(c10::DispatchKey::CPU), std::forward<Args>(args)...);
}

}  // namespace fox::ops
