#include "ops/forgetting_attn_checks.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

constexpr const char* kForgettingAttnChecksOp = "forgetting_attn";

void check_shapes(const ForgettingAttnInputs& in) {
  check_dim(kForgettingAttnChecksOp, "q", in.q, 4, "(B, Tq, H, D)");
  check_dim(kForgettingAttnChecksOp, "k", in.k, 4, "(B, Tk, Hk, D)");
  const int64_t batch = in.q.size(0), q_len = in.q.size(1), heads = in.q.size(2), dim = in.q.size(3);
  const int64_t k_len = in.k.size(1), kv_heads = in.k.size(2);
  check_shape(kForgettingAttnChecksOp, "k", in.k, {batch, k_len, kv_heads, dim}, "(B, Tk, Hk, D)");
  check_shape(kForgettingAttnChecksOp, "v", in.v, in.k.sizes(), "(B, Tk, Hk, D)");
  if (in.log_f)
    check_shape(kForgettingAttnChecksOp, "log_f", *in.log_f, {batch, k_len, heads},
                "(B, Tk, H), a gate for each query head");
  if (dim < 8 || dim > 256 || dim % 8 != 0) {
    throw Error(fmt::format("{}: head dimension {} is not supported", kForgettingAttnChecksOp, dim),
                "supported: multiples of 8 from 8 to 256");
  }
  if (kv_heads == 0 || heads % kv_heads != 0) {
    throw Error(fmt::format("{}: {} query heads over {} key heads", kForgettingAttnChecksOp, heads, kv_heads),
                "the number of query heads is a multiple of the number of key heads");
  }
  if (q_len > k_len) {
    throw Error(fmt::format("{}: {} queries but {} keys", kForgettingAttnChecksOp, q_len, k_len),
                "queries stand at the last Tq of Tk positions, so Tq is at most Tk");
  }
  if (k_len > std::numeric_limits<int32_t>::max()) {
    throw Error(fmt::format("{}: {} keys", kForgettingAttnChecksOp, k_len), "supported: fewer than 2^31");
  }
}

void check_types(const ForgettingAttnInputs& in) {
  check_floating(kForgettingAttnChecksOp, "q", in.q);
  check_dtype(kForgettingAttnChecksOp, "k", in.k, in.q.scalar_type());
  check_dtype(kForgettingAttnChecksOp, "v", in.v, in.q.scalar_type());
  check_device(kForgettingAttnChecksOp, "k", in.k, "q", in.q);
  check_device(kForgettingAttnChecksOp, "v", in.v, "q", in.q);
  if (!in.log_f) return;
  check_device(kForgettingAttnChecksOp, "log_f", *in.log_f, "q", in.q);
  const auto type = in.log_f->scalar_type();
  if (type == at::kBFloat16 || type == at::kHalf) {
    throw Error(fmt::format("{}: log_f has dtype {}", kForgettingAttnChecksOp, c10::toString(type)),
                "keep gates in float32: sums over thousands of them lose their digits in 16 bits");
  }
  if (type != compute_type(in.q.scalar_type())) {
    throw Error(fmt::format("{}: log_f has dtype {} and q {}", kForgettingAttnChecksOp, c10::toString(type),
                            c10::toString(in.q.scalar_type())),
                "log_f is float32, or float64 where q is float64");
  }
}

void check_options(const ForgettingAttnInputs& in, const ForgettingAttnOptions& options) {
  if (options.scale && !std::isfinite(*options.scale)) {
    throw Error(fmt::format("{}: scale is {}", kForgettingAttnChecksOp, *options.scale),
                "it is a finite number, by default D^-0.5");
  }
  if (options.window && *options.window < 1) {
    throw Error(fmt::format("{}: window is {}", kForgettingAttnChecksOp, *options.window),
                "it counts the keys a query sees, itself included: at least 1");
  }
  if (const auto& tolerance = options.log_pruning_tolerance; tolerance && !(*tolerance <= 0)) {
    throw Error(fmt::format("{}: log_pruning_tolerance is {}", kForgettingAttnChecksOp, *tolerance),
                "it is the logarithm of a weight that may be lost, e.g. -10; leave it out for dense attention");
  }
  if (options.logit_bound) {
    check_shape(kForgettingAttnChecksOp, "logit_bound", *options.logit_bound, {in.q.size(2)}, "(H,)");
    check_device(kForgettingAttnChecksOp, "logit_bound", *options.logit_bound, "q", in.q);
  }
  if (options.seq_start) {
    check_seq_start(kForgettingAttnChecksOp, *options.seq_start, in.q.size(0), in.k.size(1));
    check_device(kForgettingAttnChecksOp, "seq_start", *options.seq_start, "q", in.q);
  }
  if (!options.cu_seqlens) return;
  check_device(kForgettingAttnChecksOp, "cu_seqlens", *options.cu_seqlens, "q", in.q);
  if (options.seq_start || in.q.size(1) != in.k.size(1)) {
    throw Error(fmt::format("{}: cu_seqlens together with {}", kForgettingAttnChecksOp,
                            options.seq_start ? "seq_start" : "Tq < Tk"),
                "packed documents have neither padding nor a past");
  }
  check_cu_seqlens(kForgettingAttnChecksOp, *options.cu_seqlens, in.q.size(0), in.k.size(1));
}

}  // namespace

void check_forgetting_attn(const ForgettingAttnInputs& in, const ForgettingAttnOptions& options) {
  check_shapes(in);
  check_types(in);
  check_options(in, options);
}

void check_forgetting_attn_device(const at::Tensor& q) {
  if (q.is_cpu() || q.is_meta()) return;
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("fox::forgetting_attn", "");
  if (q.is_cuda() && op.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) return;
  throw Error(fmt::format("{}: no kernel for device {}", kForgettingAttnChecksOp, q.device().str()),
              q.is_cuda() ? "the CUDA backend is not loaded" : "supported: cpu, cuda");
}

}  // namespace fox::ops
