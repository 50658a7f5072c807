#include "data/longcrawl64.h"

#include <ATen/Functions.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/error.h"

namespace fox::data {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPublished = "LongCrawl64's train.zarr and heldout.zarr are arrays of documents by 65536 tokens";

/// Bytes of the chunks that hold twice `row_tokens` of a row: a batch may end one row of chunks and begin the next.
int64_t recent_bytes(const fs::path& dir, int64_t row_tokens) {
  const fs::path file = dir / ".zarray";
  const ZarrMeta meta = ZarrMeta::read(dir);
  if (meta.shape.size() != 2) {
    throw Error(fmt::format("{}: 'shape' must have two dimensions, not {}", file.string(), meta.shape.size()),
                kPublished);
  }
  if (row_tokens == 0) return meta.grid(1) * meta.chunk_bytes();
  return 2 * ((row_tokens + meta.chunks[1] - 1) / meta.chunks[1]) * meta.chunk_bytes();
}

}  // namespace

bool is_longcrawl64(const fs::path& dir) { return fs::exists(dir / ".zarray") && !fs::exists(dir / ".zgroup"); }

LongCrawl64::LongCrawl64(const fs::path& dir, int64_t row_tokens) : array_(dir, "<u2", recent_bytes(dir, row_tokens)) {}

void LongCrawl64::read(int64_t document, int64_t documents, int64_t first, int64_t tokens, uint16_t* out) const {
  array_.read(std::array{document, first}, std::array{documents, tokens}, out);
}

void LongCrawl64::check_complete(int64_t documents, int64_t first, int64_t tokens) const {
  array_.check_complete(std::array{int64_t{0}, first}, std::array{documents, tokens});
}

LongCrawl64Stream::LongCrawl64Stream(const fs::path& dir, int64_t context, int64_t batch_contexts, int32_t start_id,
                                     int64_t vocab_size)
    : dir_(dir),
      data_(dir, context),
      context_(context),
      batch_contexts_(batch_contexts),
      start_id_(start_id),
      vocab_size_(vocab_size) {
  if (context < 1 || data_.document_tokens() % context != 0) {
    throw Error(fmt::format("{}: a context of {} tokens does not divide its documents of {}", dir.string(), context,
                            data_.document_tokens()),
                "choose a power of two for data.context");
  }
  if (data_.num_documents() < batch_contexts) {
    throw Error(fmt::format("{} has {} documents, {} fewer than one batch of {} contexts", dir.string(),
                            data_.num_documents(), batch_contexts - data_.num_documents(), batch_contexts),
                "choose a smaller train.batch_tokens");
  }
}

int64_t LongCrawl64Stream::contexts_per_epoch() const {
  return data_.num_documents() / batch_contexts_ * batch_contexts_ * (data_.document_tokens() / context_);
}

void LongCrawl64Stream::check_complete(int64_t contexts) const {
  const int64_t column_contexts = data_.num_documents() / batch_contexts_ * batch_contexts_;
  const int64_t whole = contexts / column_contexts, rest = contexts % column_contexts;
  data_.check_complete(column_contexts, 0, whole * context_);
  data_.check_complete(rest, whole * context_, rest > 0 ? context_ : 0);
}

Batch LongCrawl64Stream::get(int64_t first_context, int64_t count) const {
  if (first_context < 0 || count < 0 || count > contexts_per_epoch() - first_context) {
    throw Error(fmt::format("{} holds {} contexts of {} tokens, not {}", dir_.string(), contexts_per_epoch(), context_,
                            first_context + count),
                "lower train.max_tokens: it is read once and in one order");
  }
  Batch batch{at::empty({count, context_}, at::kLong), at::empty({count, context_}, at::kLong)};
  auto* ids = batch.ids_BT.data_ptr<int64_t>();
  auto* labels = batch.labels_BT.data_ptr<int64_t>();
  const int64_t column_contexts = data_.num_documents() / batch_contexts_ * batch_contexts_;
  std::vector<uint16_t> tokens;
  for (int64_t done = 0; done < count;) {
    // Contexts of one column stand under each other, also across batches.
    const int64_t column = (first_context + done) / column_contexts,
                  document = (first_context + done) % column_contexts;
    const int64_t documents = std::min(count - done, column_contexts - document);
    tokens.resize(static_cast<size_t>(documents * context_));
    data_.read(document, documents, column * context_, context_, tokens.data());
    for (int64_t i = 0; i < documents; ++i, ids += context_, labels += context_) {
      fill(document + i, column * context_, tokens.data() + i * context_, ids, labels);
    }
    done += documents;
  }
  return batch;
}

void LongCrawl64Stream::fill(int64_t document, int64_t first, const uint16_t* tokens, int64_t* ids,
                             int64_t* labels) const {
  std::copy(tokens, tokens + context_, labels);
  ids[0] = start_id_;
  std::copy(tokens, tokens + context_ - 1, ids + 1);
  const uint16_t* largest = std::max_element(tokens, tokens + context_);
  if (*largest < vocab_size_) return;
  throw Error(fmt::format("{}: token {} of document {} is {}, but the vocabulary has {} ids", dir_.string(),
                          first + (largest - tokens), document, *largest, vocab_size_),
              "the chunk is damaged, or the store is not LongCrawl64's");
}

}  // namespace fox::data
