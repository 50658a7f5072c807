// fox::forgetting_decode and fox::append_gate_prefixes: checks, and the CPU side, which hands each sequence to
// forgetting_attn. It exists so that what runs on a GPU runs, and is tested, without one; it is not fast.
#include "ops/forgetting_decode.h"

#include <fmt/format.h>

#include <cmath>

#include "base/error.h"
#include "ops/common.h"
#include "ops/forgetting_decode_schema.h"

namespace fox::ops {
namespace {

constexpr const char* kForgettingDecodeOp = "forgetting_decode";
constexpr double kLog2e = 1.4426950408889634;

// ---------------------------------------------------------------------------------------------------- CPU kernels

void append_cpu(const at::Tensor& r, const at::Tensor& block, const at::Tensor& log_f, const at::Tensor& key_len) {
  check_append(r, block, log_f, key_len);
  const auto length = key_len.accessor<int32_t, 1>();
  const auto gate = log_f.accessor<float, 3>();
  auto sum = r.accessor<float, 3>();
  auto before = block.accessor<float, 4>();
  for (int64_t b = 0; b < log_f.size(0); ++b) {
    for (int64_t h = 0; h < log_f.size(2); ++h) {
      for (int64_t i = 0; i < log_f.size(1); ++i) {
        const int64_t key = length[b] - log_f.size(1) + i, n = key / kDecodePage;
        if (key < 0) continue;
        if (key % kDecodePage == 0) {
          const double c = n ? double{before[b][h][n - 1][0]} + before[b][h][n - 1][1] + sum[b][h][key - 1] : 0.;
          before[b][h][n][0] = static_cast<float>(c);
          before[b][h][n][1] = static_cast<float>(c - static_cast<float>(c));
        }
        const float f = gate[b][i][h];
        const float usable = f <= 0 ? std::max(f, -1000.f) : NAN;  // as usable_gate() of the CUDA kernels
        sum[b][h][key] = (key % kDecodePage ? sum[b][h][key - 1] : 0.f) + usable * static_cast<float>(kLog2e);
      }
    }
  }
}

/// Gates (1, keys, H), float64, of sequence b, whose prefixes are given.
at::Tensor gates_of(const at::Tensor& r, const at::Tensor& block, int64_t b, int64_t keys) {
  const auto start = block[b].to(at::kDouble).sum(-1).repeat_interleave(kDecodePage, 1);
  const auto c = (start + r[b].to(at::kDouble)).narrow(1, 0, keys) / kLog2e;
  return at::diff(c, 1, 1, at::zeros({c.size(0), 1}, c.options())).clamp_max(0).t().unsqueeze(0);
}

/// Keys or values (1, keys, Hk, D) of sequence b.
at::Tensor rows_of(const at::Tensor& x, const OptionalTensor& table, int64_t b, int64_t keys) {
  if (!table) return x.narrow(0, b, 1).narrow(1, 0, keys);
  const auto pages = (*table)[b].narrow(1, 0, (keys + kDecodePage - 1) / kDecodePage);  // (Hk, pages)
  // Blocks that nobody needs may name any page: their keys weigh nothing.
  const auto valid = pages.clamp(0, x.size(0) - 1).to(at::kLong);
  return x.index({valid}).flatten(1, 2).narrow(1, 0, keys).transpose(0, 1).unsqueeze(0);
}

ForgettingDecodeOutputs decode_cpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& key_len, int64_t max_key_len, const OptionalTensor& r,
                                   const OptionalTensor& block, const OptionalTensor& table,
                                   std::optional<double> scale, std::optional<int64_t> window,
                                   std::optional<double> tolerance, const OptionalTensor& bound) {
  check_decode(q, k, v, key_len, max_key_len, r, block, table, tolerance, bound);
  auto [o, lse] = empty_result(q);
  o.zero_();
  lse.fill_(-INFINITY);
  for (int64_t b = 0; b < q.size(0); ++b) {
    const int64_t keys = key_len[b].item<int32_t>(), queries = std::min(keys, q.size(1));
    if (keys > max_key_len)
      throw Error(fmt::format("{}: key_len[{}] is {}", kForgettingDecodeOp, b, keys), "at most max_key_len");
    if (keys == 0) continue;
    ForgettingAttnOptions options;
    options.scale = scale;
    options.window = window;
    options.log_pruning_tolerance = tolerance;
    options.logit_bound = bound;
    const auto log_f =
        r ? OptionalTensor(gates_of(*r, *block, b, keys).to(compute_type(q.scalar_type()))) : std::nullopt;
    const auto result = forgetting_attn(q.narrow(0, b, 1).narrow(1, q.size(1) - queries, queries),
                                        rows_of(k, table, b, keys), rows_of(v, table, b, keys), log_f, options);
    o.narrow(0, b, 1).narrow(1, q.size(1) - queries, queries).copy_(result.o_BTHD);
    lse.narrow(0, b, 1).narrow(2, q.size(1) - queries, queries).copy_(result.lse_BHT);
  }
  return {o, lse};
}

TORCH_LIBRARY_FRAGMENT(fox, m) {
  m.def("append_gate_prefixes(Tensor(a!) r, Tensor(b!) block, Tensor log_f, Tensor key_len) -> ()");
  m.def(
      "forgetting_decode(Tensor q, Tensor k, Tensor v, Tensor key_len, int max_key_len, Tensor? r=None, "
      "Tensor? block=None, Tensor? block_table=None, float? scale=None, int? window=None, "
      "float? log_pruning_tolerance=None, Tensor? logit_bound=None) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(fox, CPU, m) {
  m.impl("append_gate_prefixes", append_cpu);
  m.impl("forgetting_decode", decode_cpu);
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- checks

void check_append(const at::Tensor& r, const at::Tensor& block, const at::Tensor& log_f, const at::Tensor& key_len) {
  constexpr const char* kAppend = "append_gate_prefixes";
  check_dim(kAppend, "log_f", log_f, 3, "(B, T, H)");
  check_dim(kAppend, "block", block, 4, "(B, H, N, 2)");
  const int64_t batch = log_f.size(0), heads = log_f.size(2), blocks = block.size(2);
  check_shape(kAppend, "block", block, {batch, heads, blocks, 2}, "(B, H, N, 2)");
  check_shape(kAppend, "r", r, {batch, heads, blocks * kDecodePage}, "(B, H, 64 N)");
  check_shape(kAppend, "key_len", key_len, {batch}, "(B,)");
  check_dtype(kAppend, "log_f", log_f, at::kFloat);
  check_dtype(kAppend, "r", r, at::kFloat);
  check_dtype(kAppend, "block", block, at::kFloat);
  check_dtype(kAppend, "key_len", key_len, at::kInt);
  for (const auto* t : {&r, &block, &key_len}) check_device(kAppend, "an argument", *t, "log_f", log_f);
  if (!r.is_contiguous() || !block.is_contiguous()) {
    throw Error(fmt::format("{}: r and block are written in place", kAppend), "they must be contiguous");
  }
}

void check_decode(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& key_len,
                  int64_t max_key_len, const OptionalTensor& r, const OptionalTensor& block,
                  const OptionalTensor& table, std::optional<double> tolerance, const OptionalTensor& bound) {
  check_dim(kForgettingDecodeOp, "q", q, 4, "(B, Tq, H, D)");
  check_floating(kForgettingDecodeOp, "q", q);
  const int64_t batch = q.size(0), heads = q.size(2), dim = q.size(3);
  int64_t kv_heads, room;
  if (table) {
    check_dim(kForgettingDecodeOp, "block_table", *table, 3, "(B, Hk, pages)");
    check_dtype(kForgettingDecodeOp, "block_table", *table, at::kInt);
    check_device(kForgettingDecodeOp, "block_table", *table, "q", q);
    kv_heads = table->size(1), room = table->size(2) * kDecodePage;
    check_shape(kForgettingDecodeOp, "block_table", *table, {batch, kv_heads, table->size(2)}, "(B, Hk, pages)");
    check_dim(kForgettingDecodeOp, "k", k, 3, "(pages, 64, D)");
    check_shape(kForgettingDecodeOp, "k", k, {k.size(0), kDecodePage, dim}, "(pages, 64, D)");
  } else {
    check_dim(kForgettingDecodeOp, "k", k, 4, "(B, T, Hk, D)");
    kv_heads = k.size(2), room = k.size(1);
    check_shape(kForgettingDecodeOp, "k", k, {batch, room, kv_heads, dim}, "(B, T, Hk, D)");
  }
  check_shape(kForgettingDecodeOp, "v", v, k.sizes(), "that of k");
  for (const auto* t : {&k, &v}) {
    check_dtype(kForgettingDecodeOp, "k or v", *t, q.scalar_type());
    check_device(kForgettingDecodeOp, "k or v", *t, "q", q);
  }
  check_shape(kForgettingDecodeOp, "key_len", key_len, {batch}, "(B,)");
  check_dtype(kForgettingDecodeOp, "key_len", key_len, at::kInt);
  check_device(kForgettingDecodeOp, "key_len", key_len, "q", q);
  if (kv_heads == 0 || heads % kv_heads != 0 || q.size(1) < 1 || q.size(1) * (heads / kv_heads) > 128) {
    throw Error(
        fmt::format("{}: {} queries of {} heads over {} key heads", kForgettingDecodeOp, q.size(1), heads, kv_heads),
        "supported: heads a multiple of key heads, 1 to 128 queries a key head");
  }
  if (max_key_len < 0 || max_key_len > room) {
    throw Error(fmt::format("{}: max_key_len is {} in a cache of {}", kForgettingDecodeOp, max_key_len, room),
                "at most what there is");
  }
  if (r.has_value() != block.has_value()) throw Error(fmt::format("{}: one of r and block alone", kForgettingDecodeOp));
  if (r) {
    const int64_t blocks = block->dim() == 4 ? block->size(2) : 0;
    check_shape(kForgettingDecodeOp, "block", *block, {batch, heads, blocks, 2}, "(B, H, N, 2)");
    check_shape(kForgettingDecodeOp, "r", *r, {batch, heads, blocks * kDecodePage}, "(B, H, 64 N)");
    check_dtype(kForgettingDecodeOp, "r", *r, at::kFloat);
    check_dtype(kForgettingDecodeOp, "block", *block, at::kFloat);
    check_device(kForgettingDecodeOp, "r", *r, "q", q);
    check_device(kForgettingDecodeOp, "block", *block, "q", q);
    if (blocks * kDecodePage < max_key_len)
      throw Error(fmt::format("{}: prefixes of {} keys", kForgettingDecodeOp, blocks * kDecodePage));
  }
  if (bound) check_shape(kForgettingDecodeOp, "logit_bound", *bound, {heads}, "(H,)");
  if (tolerance && (!(*tolerance <= 0) || !bound)) {
    throw Error(fmt::format("{}: log_pruning_tolerance is {}", kForgettingDecodeOp, *tolerance),
                "the logarithm of a weight that may be lost, e.g. -10, with a bound of the logits");
  }
}

ForgettingDecodeOutputs empty_result(const at::Tensor& q) {
  return {at::empty(q.sizes(), q.options()),
          at::empty({q.size(0), q.size(2), q.size(1)}, q.options().dtype(compute_type(q.scalar_type())))};
}

// ---------------------------------------------------------------------------------------------------------- calls

GatePrefixes make_gate_prefixes(int64_t batch, int64_t heads, int64_t max_keys, at::Device device) {
  const auto options = at::TensorOptions(at::kFloat).device(device);
  const int64_t blocks = (max_keys + kDecodePage - 1) / kDecodePage;
  return {at::empty({batch, heads, blocks * kDecodePage}, options), at::empty({batch, heads, blocks, 2}, options)};
}

void append_gate_prefixes(const GatePrefixes& prefixes, const at::Tensor& log_f_BTH, const at::Tensor& key_len_B) {
  static const auto op = find_operator<AppendGatePrefixes>("fox::append_gate_prefixes");
  op.call(prefixes.r_BHT, prefixes.block_BHN2, log_f_BTH, key_len_B);
}

ForgettingAttnResult forgetting_decode(const at::Tensor& q_BTHD, const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& key_len_B, int64_t max_key_len,
                                       const std::optional<GatePrefixes>& prefixes, const ForgettingDecodeOptions& x) {
  static const auto op = find_operator<ForgettingDecode>("fox::forgetting_decode");
  const auto r = prefixes ? OptionalTensor(prefixes->r_BHT) : std::nullopt;
  const auto block = prefixes ? OptionalTensor(prefixes->block_BHN2) : std::nullopt;
  const auto [o, lse] = op.call(q_BTHD, k, v, key_len_B, max_key_len, r, block, x.block_table, x.scale, x.window,
                                x.log_pruning_tolerance, x.logit_bound);
  return {o, lse};
}

}  // namespace fox::ops
