// The CUDA side of forgetting attention: see the contract in forgetting_attn.cpp.
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "kernels/cuda/forgetting_attn.h"
#include "ops/cuda_common.h"
#include "ops/forgetting_attn.h"
#include "ops/forgetting_attn_schema.h"
#include "ops/gate_report_cuda.h"

namespace fox::ops {
namespace {

// The kernels read 16 bytes at a time along D: anything else is copied, never misread.
at::Tensor aligned(const at::Tensor& t) {
  const int64_t vec = 16 / t.element_size();
  bool fits = t.stride(3) == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d < 3; ++d) fits = fits && (t.size(d) == 1 || t.stride(d) % vec == 0);
  return fits ? t : t.clone(at::MemoryFormat::Contiguous);
}

FoxTensor view(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}
FoxGates gates(const at::Tensor& t) {
  return {const_cast<float*>(t.const_data_ptr<float>()), t.stride(0), t.stride(1), t.stride(2)};
}

FoxDtype kernel_dtype(at::ScalarType type) {
  if (type == at::kBFloat16) return kFoxBfloat16;
  if (type == at::kHalf) return kFoxFloat16;
  if (type == at::kFloat) {
    TORCH_WARN_ONCE(
        "fox: attention in float32 runs on the CUDA cores, many times slower than bfloat16 on the tensor cores");
    return kFoxFloat32;
  }
  throw Error(fmt::format("forgetting_attn: q is {} on a CUDA device", c10::toString(type)),
              "supported there: bfloat16, float16, float32; float64 runs on the CPU");
}

/// max |q·k * scale| per query head by Cauchy and Schwarz.
at::Tensor measured_bound(const at::Tensor& q, const at::Tensor& k, double scale) {
  const auto largest_norm = [](const at::Tensor& t) {
    return at::linalg_vector_norm(t, 2, at::IntArrayRef({3}), false, at::kFloat).amax(at::IntArrayRef({0, 1}));
  };
  const auto k_norm = largest_norm(k).repeat_interleave(q.size(2) / k.size(2));
  return largest_norm(q) * k_norm * std::abs(scale);
}

/// The kernels' view of a call; keeps what it points to alive.
struct Call {
  at::Tensor q, k, v, seq_start, cu_seqlens, logit_bound, workspace;
  GateReport report;
  ForgettingAttnParams params{};

  Call(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in, const OptionalTensor& log_f,
       const ForgettingAttnOptions& options)
      : q(aligned(q_in)), k(aligned(k_in)), v(aligned(v_in)), report(q.device()) {
    auto& p = params;
    p.dtype = kernel_dtype(q.scalar_type());
    p.bad_gate = report.word();
    p.batch = static_cast<int32_t>(q.size(0));
    p.query_len = static_cast<int32_t>(q.size(1));
    p.key_len = static_cast<int32_t>(k.size(1));
    p.query_heads = static_cast<int32_t>(q.size(2));
    p.kv_heads = static_cast<int32_t>(k.size(2));
    p.head_dim = static_cast<int32_t>(q.size(3));
    p.q = view(q), p.k = view(k), p.v = view(v);
    if (log_f) p.log_f = gates(*log_f);
    const double scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim)));
    p.scale = static_cast<float>(scale);
    p.window = options.window ? static_cast<int32_t>(std::min<int64_t>(*options.window, p.key_len)) : 0;
    if (options.seq_start) {
      seq_start = options.seq_start->contiguous();
      p.seq_start = seq_start.const_data_ptr<int64_t>();
    }
    if (options.cu_seqlens) {
      cu_seqlens = options.cu_seqlens->contiguous();
      p.cu_seqlens = cu_seqlens.const_data_ptr<int64_t>();
      p.num_documents = static_cast<int32_t>(cu_seqlens.size(0) - 1);
    }
    // Also without pruning: a small bound spares the forward kernel its running maximum.
    if (options.logit_bound) logit_bound = options.logit_bound->to(q.device(), at::kFloat).contiguous();
    // A tolerance of 0 prunes nothing: the call without one, bit for bit.
    constexpr double kNothing = -std::numeric_limits<double>::infinity();
    if (log_f && options.log_pruning_tolerance.value_or(kNothing) > kNothing) {
      if (!logit_bound.defined()) logit_bound = measured_bound(q, k, scale);
      p.pruned = 1;
      p.log_tolerance = static_cast<float>(*options.log_pruning_tolerance);
    }
    if (logit_bound.defined()) p.logit_bound = logit_bound.const_data_ptr<float>();
    p.deterministic = options.deterministic;
  }

  void run(const char* op, size_t (*workspace_size)(const ForgettingAttnParams*),
           int (*entry)(const ForgettingAttnParams*, cudaStream_t)) {
    workspace = at::empty({static_cast<int64_t>(workspace_size(&params))}, q.options().dtype(at::kByte));
    params.workspace = workspace.mutable_data_ptr();
    params.workspace_bytes = static_cast<size_t>(workspace.numel());
    if (entry(&params, stream_of(q)) != 0) throw Error(fmt::format("{}: {}", op, fox_kernels_last_error()));
    report.finish(stream_of(q));
  }
};

ForgettingAttnOutputs forward_cuda(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const OptionalTensor& log_f, std::optional<double> scale,
                                   std::optional<int64_t> window, const OptionalTensor& seq_start,
                                   const OptionalTensor& cu_seqlens, std::optional<double> log_pruning_tolerance,
                                   const OptionalTensor& logit_bound, bool deterministic) {
  static const auto op = find_operator<ForgettingAttnForward>("fox::forgetting_attn");
  const c10::cuda::CUDAGuard guard(q.device());
  auto [o, lse] = checked_results(op, q, k, v, log_f, scale, window, seq_start, cu_seqlens, log_pruning_tolerance,
                                  logit_bound, deterministic);
  if (q.numel() == 0) return {o, lse};
  Call call(q, k, v, log_f, {scale, window, seq_start, cu_seqlens, log_pruning_tolerance, logit_bound, deterministic});
  call.params.o = view(o);
  call.params.lse = lse.mutable_data_ptr();
  call.run("forgetting_attn", fox_forgetting_attn_forward_workspace, fox_forgetting_attn_forward);
  return {o, lse};
}

ForgettingAttnGradients backward_cuda(const at::Tensor& grad_o, const at::Tensor& q, const at::Tensor& k,
                                      const at::Tensor& v, const OptionalTensor& log_f, const at::Tensor& o,
                                      const at::Tensor& lse, std::optional<double> scale, std::optional<int64_t> window,
                                      const OptionalTensor& seq_start, const OptionalTensor& cu_seqlens,
                                      std::optional<double> log_pruning_tolerance, const OptionalTensor& logit_bound,
                                      bool deterministic) {
  static const auto op = find_operator<ForgettingAttnBackward>("fox::forgetting_attn_backward");
  const c10::cuda::CUDAGuard guard(q.device());
  checked_results(op, grad_o, q, k, v, log_f, o, lse, scale, window, seq_start, cu_seqlens, log_pruning_tolerance,
                  logit_bound, deterministic);
  Call call(q, k, v, log_f, {scale, window, seq_start, cu_seqlens, log_pruning_tolerance, logit_bound, deterministic});
  const auto packed = [](const at::Tensor& t) { return at::empty(t.sizes(), t.options()); };
  const auto dq = packed(q), dk = packed(k), dv = packed(v);
  const auto d_log_f = log_f ? packed(*log_f) : at::empty({0}, q.options());
  if (q.numel() == 0) return {dq, dk.zero_(), dv.zero_(), d_log_f.zero_()};
  const auto out = aligned(o), d_o = aligned(grad_o), log_sum = lse.contiguous();
  auto& p = call.params;
  p.o = view(out), p.d_o = view(d_o);
  p.lse = const_cast<void*>(log_sum.const_data_ptr());
  p.d_q = view(dq), p.d_k = view(dk), p.d_v = view(dv);
  if (log_f) p.d_log_f = gates(d_log_f);
  call.run("forgetting_attn_backward", fox_forgetting_attn_backward_workspace, fox_forgetting_attn_backward);
  return {dq, dk, dv, d_log_f};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("forgetting_attn", forward_cuda);
  m.impl("forgetting_attn_backward", backward_cuda);
}

}  // namespace
}  // namespace fox::ops
