// The CUDA side of decoding: see forgetting_decode.cpp.
#include <cmath>

#include "kernels/cuda/forgetting_decode.h"
#include "ops/cuda_common.h"
#include "ops/forgetting_decode.h"
#include "ops/forgetting_decode_schema.h"

namespace fox::ops {
namespace {

// The kernel reads 16 bytes at a time along D.
at::Tensor aligned(const at::Tensor& t) {
  bool fits = t.stride(-1) == 1 && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) fits = fits && t.stride(d) % 8 == 0;
  return fits ? t : t.clone(at::MemoryFormat::Contiguous);
}

FoxTensor view(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.dim() == 4 ? t.stride(2) : 0};
}

FoxPrefixCache prefix_cache(const at::Tensor& r, const at::Tensor& block) {
  return {const_cast<float*>(r.const_data_ptr<float>()), const_cast<float*>(block.const_data_ptr<float>()),
          static_cast<int32_t>(block.size(2))};
}

void append_cuda(const at::Tensor& r, const at::Tensor& block, const at::Tensor& log_f, const at::Tensor& key_len) {
  const c10::cuda::CUDAGuard guard(r.device());
  check_append(r, block, log_f, key_len);
  if (log_f.numel() == 0) return;
  const auto length = key_len.contiguous();
  const FoxGates gates{const_cast<float*>(log_f.const_data_ptr<float>()), log_f.stride(0), log_f.stride(1),
                       log_f.stride(2)};
  if (fox_forgetting_prefix_append(prefix_cache(r, block), gates, static_cast<int32_t>(log_f.size(0)),
                                   static_cast<int32_t>(log_f.size(2)), static_cast<int32_t>(log_f.size(1)),
                                   length.const_data_ptr<int32_t>(), stream_of(r)) != 0) {
    throw Error(fmt::format("append_gate_prefixes: {}", fox_kernels_last_error()));
  }
}

ForgettingDecodeOutputs decode_cuda(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
                                    const at::Tensor& key_len, int64_t max_key_len, const OptionalTensor& r_in,
                                    const OptionalTensor& block_in, const OptionalTensor& table_in,
                                    std::optional<double> scale, std::optional<int64_t> window,
                                    std::optional<double> tolerance, const OptionalTensor& bound_in) {
  const c10::cuda::CUDAGuard guard(q_in.device());
  check_decode(q_in, k_in, v_in, key_len, max_key_len, r_in, block_in, table_in, tolerance, bound_in);
  if (q_in.scalar_type() != at::kBFloat16 && q_in.scalar_type() != at::kHalf) {
    throw Error(fmt::format("forgetting_decode: q is {} on a CUDA device", c10::toString(q_in.scalar_type())),
                "supported there: bfloat16, float16; forgetting_attn takes float32 too");
  }
  auto [o, lse] = empty_result(q_in);
  if (q_in.numel() == 0) return {o, lse};
  if (max_key_len == 0) return {o.zero_(), lse.fill_(-INFINITY)};
  const auto contiguous = [](const OptionalTensor& t) { return t ? t->contiguous() : at::Tensor(); };
  const auto q = aligned(q_in), k = aligned(k_in), v = aligned(v_in), length = key_len.contiguous();
  const auto r = contiguous(r_in), block = contiguous(block_in), table = contiguous(table_in);
  const auto bound = bound_in ? bound_in->to(q.device(), at::kFloat).contiguous() : at::Tensor();
  ForgettingDecodeParams p{};
  p.dtype = q.scalar_type() == at::kHalf ? kFoxFloat16 : kFoxBfloat16;
  p.batch = static_cast<int32_t>(q.size(0));
  p.query_len = static_cast<int32_t>(q.size(1));
  p.query_heads = static_cast<int32_t>(q.size(2));
  p.head_dim = static_cast<int32_t>(q.size(3));
  p.kv_heads = static_cast<int32_t>(table.defined() ? table.size(1) : k.size(2));
  p.q = view(q), p.k = view(k), p.v = view(v), p.o = view(o);
  p.lse = lse.mutable_data_ptr<float>();
  if (table.defined()) {
    p.block_table = table.const_data_ptr<int32_t>();
    p.max_pages = static_cast<int32_t>(table.size(2));
  }
  p.key_len = length.const_data_ptr<int32_t>();
  p.max_key_len = static_cast<int32_t>(max_key_len);
  if (r.defined()) p.prefix = prefix_cache(r, block);
  p.scale = static_cast<float>(scale.value_or(1 / std::sqrt(static_cast<double>(p.head_dim))));
  p.window = static_cast<int32_t>(std::min(window.value_or(0), max_key_len));
  if (bound.defined()) p.logit_bound = bound.const_data_ptr<float>();
  p.pruned = tolerance.has_value();
  p.log_tolerance = static_cast<float>(tolerance.value_or(0));
  const auto workspace =
      at::empty({static_cast<int64_t>(fox_forgetting_decode_workspace(&p))}, q.options().dtype(at::kByte));
  p.workspace = workspace.mutable_data_ptr();
  p.workspace_bytes = static_cast<size_t>(workspace.numel());
  if (fox_forgetting_decode(&p, stream_of(q)) != 0) {
    throw Error(fmt::format("forgetting_decode: {}", fox_kernels_last_error()));
  }
  return {o, lse};
}

TORCH_LIBRARY_IMPL(fox, CUDA, m) {
  m.impl("append_gate_prefixes", append_cuda);
  m.impl("forgetting_decode", decode_cuda);
}

}  // namespace
}  // namespace fox::ops
