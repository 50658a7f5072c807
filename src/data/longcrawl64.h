#pragma once

#include <filesystem>

#include "data/training_stream.h"
#include "data/zarr.h"

namespace fox::data {

/// Whether `dir` looks like one of LongCrawl64's stores (train.zarr, heldout.zarr): a zarr array and no group.
bool is_longcrawl64(const std::filesystem::path& dir);

/// LongCrawl64 as published: one zarr v2 array of u2, one document a row, all of one length; Blosc lz4 chunks of 2048
/// by 2048 in files "row.column". Its tokens are Tokenizer::gpt2_json()'s, and no document begins with end_of_text.
class LongCrawl64 {
 public:
  /// `row_tokens`: how much of a row is read at a time; the chunks for two such pieces are kept in memory (0: of whole
  /// rows). Throws Error naming .zarray for another type, order or number of dimensions.
  explicit LongCrawl64(const std::filesystem::path& dir, int64_t row_tokens = 0);

  int64_t num_documents() const { return array_.meta().shape[0]; }
  int64_t document_tokens() const { return array_.meta().shape[1]; }
  int64_t num_tokens() const { return num_documents() * document_tokens(); }
  /// Tokens [first, first + tokens) of each of the documents [document, document + documents), one after another.
  /// Throws Error naming the chunk file that is missing or damaged. Thread-safe.
  void read(int64_t document, int64_t documents, int64_t first, int64_t tokens, uint16_t* out) const;
  /// Throws Error naming a chunk file of tokens [first, first + tokens) of the first `documents` that is missing.
  void check_complete(int64_t documents, int64_t first, int64_t tokens) const;

 private:
  ZarrArray array_;
};

/// LongCrawl64's documents in the published order, one epoch of it: batches of B contexts of S tokens go down the
/// documents, B at a time, taking the first S tokens of each, then down again for the next S, and so on; what is left
/// of the documents when B does not divide them is not read. No shuffling. Each context begins with the input
/// `start_id`, whatever its place in the document.
class LongCrawl64Stream : public TrainingStream {
 public:
  /// Throws Error when `context` does not divide a document, or when there are fewer than `batch_contexts` documents.
  /// `vocab_size`: ids from there on are an Error where they are read.
  LongCrawl64Stream(const std::filesystem::path& dir, int64_t context, int64_t batch_contexts, int32_t start_id,
                    int64_t vocab_size);
  /// Throws Error beyond the epoch's end.
  Batch get(int64_t first_context, int64_t count) const override;
  int64_t contexts_per_epoch() const override;
  int64_t num_documents() const { return data_.num_documents(); }
  /// Throws Error naming a chunk file of the first `contexts` contexts that is missing: better now than after days.
  void check_complete(int64_t contexts) const;

 private:
  void fill(int64_t document, int64_t first, const uint16_t* tokens, int64_t* ids, int64_t* labels) const;

  std::filesystem::path dir_;
  LongCrawl64 data_;
  int64_t context_, batch_contexts_;
  int32_t start_id_;
  int64_t vocab_size_;
};

}  // namespace fox::data
