#include "kernels/cuda/rms_norm.h"

#include <type_traits>

#include "ops/cuda_common.h"
#include "ops/gated_rms_norm_steps.h"

// fox::rms_norm, fox::add_rms_norm and fox::gated_rms_norm: one kernel. Shapes that its fast path does not take are for
// rms_norm's general one, and for the others' compositions.
namespace fox::ops {
namespace {

/// x and weight in the layout that the kernels read; it must outlive their parameters.
struct Inputs {
  Rows x;
  at::Tensor weight;
  double eps;
  int64_t num_groups;

  Inputs(const at::Tensor& x_in, const OptionalTensor& weight_in, double eps, int64_t num_groups)
      : x(as_rows(x_in)), eps(eps), num_groups(num_groups) {
    if (weight_in) weight = cast(*weight_in, compute_type(x_in.scalar_type())).contiguous();
  }

  template <class TX, class TY, class A>
  cuda::RmsNormParams<TX, TY, A> params() const {
    const int64_t width = x.width / num_groups;
    const bool shared = weight.defined() && weight.size(0) == width && num_groups > 1;
    return {.x = data<TX>(x.tensor),
            .x_stride = x.stride,
            .weight = data<A>(weight),
            .weight_stride = shared ? 0 : width,
            .rows = x.rows,
            .groups = num_groups,
            .width = width,
            .eps = static_cast<A>(eps)};
  }
};

/// Runs the backward kernel with `gradients`, and the sum that makes `weight`'s gradient of its partial ones.
template <class TX, class TY, class A>
at::Tensor backward(const cuda::RmsNormParams<TX, TY, A>& p, const at::Tensor& dy, const at::Tensor& dsum,
                    cuda::RmsNormGradients<TX, TY, A> gradients, const at::Tensor& weight) {
  const auto stream = stream_of(dy);
  if (!weight.defined() || dy.numel() == 0) {
    check_launch("rms_norm_backward", cuda::rms_norm_backward(p, data<TY>(dy), data<TX>(dsum), gradients, stream));
    return weight.defined() ? at::zeros_like(weight) : weight;
  }
  const auto partial = at::empty({cuda::rms_norm_backward_partials(p), weight.numel()}, weight.options());
  gradients.partial = mutable_data<A>(partial);
  check_launch("rms_norm_backward", cuda::rms_norm_backward(p, data<TY>(dy), data<TX>(dsum), gradients, stream));
  return sum_of_rows("rms_norm_backward", partial).view(weight.sizes());
}

at::Tensor forward_cuda(const at::Tensor& x, const OptionalTensor& weight, double eps, int64_t num_groups) {
  static const auto op =
      find_operator<at::Tensor(const at::Tensor&, const OptionalTensor&, double, int64_t)>("fox::rms_norm");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, weight, eps, num_groups);
  const Inputs in(x, weight, eps, num_groups);
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    check_launch("rms_norm",
                 cuda::rms_norm(in.params<T, T, A>(), static_cast<T*>(nullptr), mutable_data<T>(y), stream_of(x)));
  });
  return y;
}

using Gradients = std::tuple<at::Tensor, at::Tensor>;

Gradients backward_cuda(const at::Tensor& dy, const at::Tensor& x, const OptionalTensor& weight, double eps,
                        int64_t num_groups) {
  static const auto op =
      find_operator<Gradients(const at::Tensor&, const at::Tensor&, const OptionalTensor&, double, int64_t)>(
          "fox::rms_norm_backward");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [dx, dweight] = checked_results(op, dy, x, weight, eps, num_groups);
  const Inputs in(x, weight, eps, num_groups);
  const auto g = packed(cast(dy, x.scalar_type()));
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    const auto sum = backward<T, T, A>(in.params<T, T, A>(), g, {}, {.dx = mutable_data<T>(dx)}, in.weight);
    if (weight) dweight = cast(sum, weight->scalar_type());
  });
  return {dx, dweight};
}

// --- with a branch ---------------------------------------------------------------------------------------------------

/// Calls f.template operator()<TX, TY, A>() if there is a kernel for a stream of dtype x and a branch of dtype y.
template <class F>
void dispatch_pair(at::ScalarType x, at::ScalarType y, const F& f) {
  if (x != y && (x != at::kFloat || y == at::kDouble)) return;
  dispatch_cuda(y, [&]<class TY, class A>() {
    if (x == y) {
      f.template operator()<TY, TY, A>();
    } else if constexpr (std::is_same_v<A, float>) {
      f.template operator()<float, TY, float>();
    }
  });
}

using AddResults = std::tuple<at::Tensor, at::Tensor>;
using AddGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

AddResults add_forward_cuda(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight, double eps) {
  static const auto op =
      find_operator<AddResults(const at::Tensor&, const at::Tensor&, const at::Tensor&, double)>("fox::add_rms_norm");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [sum, normed] = checked_results(op, x, branch, weight, eps);
  const Inputs in(x, weight, eps, 1);
  const auto added = as_rows(branch);
  bool fast = false;
  dispatch_pair(x.scalar_type(), branch.scalar_type(), [&]<class TX, class TY, class A>() {
    auto p = in.params<TX, TY, A>();
    p.branch = data<TY>(added.tensor), p.branch_stride = added.stride;
    fast = cuda::rms_norm_is_fast(p);
    if (!fast) return;
    check_launch("add_rms_norm", cuda::rms_norm(p, mutable_data<TX>(sum), mutable_data<TY>(normed), stream_of(x)));
  });
  return fast ? AddResults{sum, normed} : composed_results(op, x, branch, weight, eps);
}

AddGradients add_backward_cuda(const OptionalTensor& dsum, const at::Tensor& dnormed, const at::Tensor& sum,
                               const at::Tensor& weight, double eps) {
  static const auto op = find_operator<AddGradients(const OptionalTensor&, const at::Tensor&, const at::Tensor&,
                                                    const at::Tensor&, double)>("fox::add_rms_norm_backward");
  const c10::cuda::CUDAGuard guard(sum.device());
  auto [dx, dbranch, dweight] = checked_results(op, dsum, dnormed, sum, weight, eps);
  const Inputs in(sum, weight, eps, 1);
  const auto g = packed(dnormed);
  const auto passed = dsum ? packed(cast(*dsum, sum.scalar_type())) : at::Tensor();
  bool fast = false;
  dispatch_pair(sum.scalar_type(), dnormed.scalar_type(), [&]<class TX, class TY, class A>() {
    const auto p = in.params<TX, TY, A>();
    fast = cuda::rms_norm_is_fast(p);
    if (!fast) return;
    dweight = backward<TX, TY, A>(p, g, passed, {.dx = mutable_data<TX>(dx), .dbranch = mutable_data<TY>(dbranch)},
                                  in.weight);
  });
  if (!fast) return composed_results(op, dsum, dnormed, sum, weight, eps);
  return {dx, dbranch, cast(dweight, weight.scalar_type())};
}

// --- with a gate -----------------------------------------------------------------------------------------------------

using GatedForward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t, bool);
using GatedGradients = GatedRmsNormGradients;
using GatedBackward = GatedGradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double,
                                     int64_t, bool);

template <class T, class A>
cuda::RmsNormParams<T, T, A> gated_params(const Inputs& in, const Rows& gate, bool silu) {
  auto p = in.params<T, T, A>();
  p.gate = data<T>(gate.tensor), p.gate_stride = gate.stride;
  p.activation = silu ? cuda::Activation::kSilu : cuda::Activation::kSigmoid;
  return p;
}

at::Tensor gated_forward_cuda(const at::Tensor& x, const at::Tensor& gate_in, const at::Tensor& weight, double eps,
                              int64_t num_groups, bool silu) {
  static const auto op = find_operator<GatedForward>("fox::gated_rms_norm");
  const c10::cuda::CUDAGuard guard(x.device());
  auto y = checked_results(op, x, gate_in, weight, eps, num_groups, silu);
  const Inputs in(x, weight, eps, num_groups);
  const auto gate = as_rows(gate_in);
  bool fast = false;
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    const auto p = gated_params<T, A>(in, gate, silu);
    fast = cuda::rms_norm_is_fast(p);
    if (!fast) return;
    check_launch("gated_rms_norm", cuda::rms_norm(p, static_cast<T*>(nullptr), mutable_data<T>(y), stream_of(x)));
  });
  return fast ? y : gated_rms_norm_steps(x, gate_in, weight, eps, num_groups, silu);
}

GatedGradients gated_backward_cuda(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& gate_in,
                                   const at::Tensor& weight, double eps, int64_t num_groups, bool silu) {
  static const auto op = find_operator<GatedBackward>("fox::gated_rms_norm_backward");
  const c10::cuda::CUDAGuard guard(x.device());
  auto [dx, dgate, dweight] = checked_results(op, dy, x, gate_in, weight, eps, num_groups, silu);
  const Inputs in(x, weight, eps, num_groups);
  const auto gate = as_rows(gate_in);
  const auto g = packed(cast(dy, x.scalar_type()));
  bool fast = false;
  dispatch_cuda(x.scalar_type(), [&]<class T, class A>() {
    const auto p = gated_params<T, A>(in, gate, silu);
    fast = cuda::rms_norm_is_fast(p);
    if (!fast) return;
    dweight = backward<T, T, A>(p, g, {}, {.dx = mutable_data<T>(dx), .dgate = mutable_data<T>(dgate)}, in.weight);
  });
  if (!fast) return gated_rms_norm_backward_steps(dy, x, gate_in, weight, eps, num_groups, silu);
  return {dx, dgate, cast(dweight, weight.scalar_type())};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("rms_norm", forward_cuda);
  m.impl("rms_norm_backward", backward_cuda);
  m.impl("add_rms_norm", add_forward_cuda);
  m.impl("add_rms_norm_backward", add_backward_cuda);
  m.impl("gated_rms_norm", gated_forward_cuda);
  m.impl("gated_rms_norm_backward", gated_backward_cuda);
}

}  // namespace
}  // namespace fox::ops
