#include "ops/recurrence.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "ops/common.h"

namespace fox::ops {
namespace {

// (T,) seen from a tensor (B, T, ...).
at::Tensor along_time(const at::Tensor& x_T, const at::Tensor& like_BT) {
  std::vector<int64_t> shape(like_BT.dim(), 1);
  shape[1] = -1;
  return x_T.view(shape);
}

at::Tensor is_padding(const at::Tensor& x_BT, const at::Tensor& seq_start) {
  const auto position_T = at::arange(x_BT.size(1), x_BT.options().dtype(at::kLong).requires_grad(false));
  std::vector<int64_t> shape(x_BT.dim(), 1);
  shape[0] = -1;
  return along_time(position_T, x_BT) < seq_start.to(x_BT.device()).view(shape);
}

}  // namespace

void check_recurrence(const char* op, const RecurrenceOptions& options, int64_t batch, int64_t length,
                      at::IntArrayRef state_shape, const char* layout) {
  if (options.chunk_size < 1) {
    throw Error(fmt::format("{}: chunk_size is {}", op, options.chunk_size), "it is a number of tokens, at least 1");
  }
  if (length < 1) throw Error(fmt::format("{}: there is no token", op), "the time dimension has at least 1");
  if (options.cu_seqlens) check_cu_seqlens(op, *options.cu_seqlens, batch, length);
  if (options.seq_start) check_seq_start(op, *options.seq_start, batch, length);
  if (!options.initial_state) return;
  check_floating(op, "initial_state", *options.initial_state);
  check_shape(op, "initial_state", *options.initial_state, state_shape, layout);
  if (options.cu_seqlens) {
    throw Error(fmt::format("{}: initial_state and cu_seqlens do not go together", op),
                "each packed document starts from a state of 0");
  }
}

at::Tensor initial_state(const RecurrenceOptions& options, at::IntArrayRef state_shape, const at::Tensor& like) {
  if (options.initial_state) return cast(*options.initial_state, like.scalar_type());
  return at::zeros(state_shape, like.options().requires_grad(false));
}

double score_scale(const at::Tensor& q) { return 1 / std::sqrt(static_cast<double>(q.size(-1))); }

at::Tensor document_numbers(const at::Tensor& cu_seqlens, int64_t length) {
  const auto position_T = at::arange(length, cu_seqlens.options());
  return at::searchsorted(cu_seqlens, position_T, /*out_int32=*/false, /*right=*/true);
}

at::Tensor tokens_before(const at::Tensor& cu_seqlens, int64_t length) {
  const auto begins_T = cu_seqlens.index_select(0, document_numbers(cu_seqlens, length) - 1);
  return at::arange(length, cu_seqlens.options()) - begins_T;
}

at::Tensor document_starts(const at::Tensor& cu_seqlens, int64_t length) {
  const auto document_T = document_numbers(cu_seqlens, length);
  return at::cat({at::ones_like(document_T.narrow(0, 0, 1), at::kBool), document_T.diff() != 0});
}

at::Tensor without_padding(const at::Tensor& x_BT, const std::optional<at::Tensor>& seq_start) {
  return seq_start ? x_BT.masked_fill(is_padding(x_BT, *seq_start), 0.0) : x_BT;
}

at::Tensor with_resets(const at::Tensor& log_decay_BT, const RecurrenceOptions& options) {
  auto result = without_padding(log_decay_BT, options.seq_start);
  if (!options.cu_seqlens) return result;
  const auto starts_T = document_starts(options.cu_seqlens->to(result.device()), result.size(1));
  return result.masked_fill(along_time(starts_T, result), -std::numeric_limits<double>::infinity());
}

at::Tensor to_chunks(const at::Tensor& x_BTH, int64_t chunk) {
  const int64_t missing = (chunk - x_BTH.size(1) % chunk) % chunk;
  auto x = x_BTH;
  if (missing > 0) {
    auto shape = x.sizes().vec();
    shape[1] = missing;
    x = at::cat({x, at::zeros(shape, x.options().requires_grad(false))}, 1);
  }
  return x.transpose(1, 2).unflatten(2, {-1, chunk});
}

at::Tensor from_chunks(const at::Tensor& x_BHnC, int64_t length) {
  return x_BHnC.flatten(2, 3).narrow(2, 0, length).transpose(1, 2);
}

ChunkStates scan_chunks(const at::Tensor& decay_BHn, const at::Tensor& added_BHnKV, const at::Tensor& first_BHKV) {
  const auto decays = decay_BHn.unbind(2), added = added_BHnKV.unbind(2);
  std::vector<at::Tensor> before;
  auto state = first_BHKV;
  for (size_t i = 0; i < added.size(); ++i) {
    before.push_back(state);
    state = at::addcmul(added[i], state, decays[i]);
  }
  return {at::stack(before, 2), state};
}

}  // namespace fox::ops
