#include "data/batch_stream.h"

#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "data/permutation.h"

namespace fox::data {

BatchStream::BatchStream(std::shared_ptr<const TokenStore> store, int64_t context, uint64_t seed, int32_t start_id)
    : store_(std::move(store)), context_(context), seed_(seed), start_id_(start_id) {
  if (context < 1) throw Error(fmt::format("a context of {} tokens cannot be", context), "choose at least 1");
  const int64_t size = store_->num_tokens();
  if (size < context) {
    throw Error(fmt::format("the text has {} tokens, {} fewer than one context of {}", size, context - size, context),
                "add text, or choose a shorter context");
  }
}

int64_t BatchStream::contexts_per_epoch() const { return store_->num_tokens() / context_; }

void BatchStream::read(int64_t index, std::span<int64_t> out) const {
  const int64_t epoch = index / contexts_per_epoch();
  const uint64_t key = hash_numbers(seed_, epoch);
  const auto size = static_cast<uint64_t>(store_->num_tokens());
  const Permutation order(static_cast<uint64_t>(contexts_per_epoch()), key);
  const uint64_t slot = order(static_cast<uint64_t>(index % contexts_per_epoch()));
  const uint64_t begin = (hash_numbers(key, size) % size + slot * static_cast<uint64_t>(context_)) % size;
  const size_t before_end = std::min<uint64_t>(size - begin, out.size());
  store_->read(static_cast<int64_t>(begin), out.first(before_end));
  if (before_end < out.size()) store_->read(0, out.subspan(before_end));
}

Batch BatchStream::get(int64_t first_context, int64_t count) const {
  if (first_context < 0 || count < 0)
    throw Error(fmt::format("no contexts from {} on, {} of them", first_context, count));
  Batch batch{at::empty({count, context_}, at::kLong), at::empty({count, context_}, at::kLong)};
  auto* ids = batch.ids_BT.data_ptr<int64_t>();
  auto* labels = batch.labels_BT.data_ptr<int64_t>();
  for (int64_t row = 0; row < count; ++row, ids += context_, labels += context_) {
    read(first_context + row, std::span(labels, static_cast<size_t>(context_)));
    ids[0] = start_id_;
    std::copy(labels, labels + context_ - 1, ids + 1);
  }
  return batch;
}

}  // namespace fox::data
