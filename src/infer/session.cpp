#include "infer/session.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace fox::infer {

Session::Session(model::LanguageModel& model, int64_t prefill_chunk)
    : model_(model), cache_(model.make_cache()), prefill_chunk_(prefill_chunk) {}

at::Tensor Session::prefill(std::span<const int32_t> ids) {
  if (ids.empty()) throw Error("a prompt needs at least one token", "begin it with the end-of-text token");
  const int64_t vocab = model_.config().vocab_size;
  for (int32_t id : ids) {
    if (id < 0 || id >= vocab) {
      throw Error(fmt::format("token {} is outside the model's vocabulary of {} tokens", id, vocab),
                  "use the tokenizer that the model was trained with");
    }
  }
  const at::NoGradGuard no_grad;
  const at::Device device = model_.parameters().front().tensor.device();
  const auto total = static_cast<int64_t>(ids.size());
  at::Tensor ids_T = at::empty({total}, at::kLong);
  std::copy(ids.begin(), ids.end(), ids_T.mutable_data_ptr<int64_t>());
  ids_T = ids_T.to(device);
  // Only the last piece needs the LM head, and of that only the last token.
  for (int64_t first = 0; first + 1 < total; first += prefill_chunk_) {
    const int64_t n = std::min(prefill_chunk_, total - 1 - first);
    model_.hidden(ids_T.narrow(0, first, n).unsqueeze(0), {}, &cache_);
  }
  const at::Tensor logits_11V = model_.logits(ids_T.narrow(0, total - 1, 1).unsqueeze(0), {}, &cache_);
  return logits_11V[0][0].to(at::kCPU, at::kFloat);
}

at::Tensor Session::step(int32_t id) { return prefill({&id, 1}); }

}  // namespace fox::infer
