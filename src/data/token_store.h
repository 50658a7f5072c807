#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace fox::data {

/// Tokens on disk: a zarr v2 group with `tokens` (u2, or u4 for vocabularies above 65,536; Blosc lz4 chunks) and
/// `doc_offsets` (i8, first token of each document and the total). Readable by Python's zarr.
///
/// Each document is led by the tokenizer's end_of_text, as a token of the stream: a model that is trained on contexts
/// that run over several documents sees where one begins, learns to begin (and so to end) one, and an empty document is
/// one token. It has no bytes, so bits per byte are counted over the text alone.
class TokenStore {
 public:
  /// Whether `dir` is a folder that open() would take.
  static bool is_store(const std::filesystem::path& dir);
  /// Opens a store, or one of LongCrawl64's arrays as if it were one: its documents are the rows, and no end_of_text
  /// leads them. Throws Error naming the file that is missing or damaged.
  static TokenStore open(const std::filesystem::path& dir);
  ~TokenStore();
  TokenStore(TokenStore&&) noexcept;

  int64_t num_tokens() const;
  int64_t num_documents() const;
  /// Where documents [first, first + out.size()) begin; document num_documents() begins where the last one ends. Read
  /// from disk when asked for: a corpus may have more documents than memory has bytes for. Throws naming the chunk file
  /// that is missing or damaged. Thread-safe.
  void read_doc_offsets(int64_t first, std::span<int64_t> out) const;
  const std::string& tokenizer_fingerprint() const;
  /// Tokens [first, first + out.size()); throws naming the chunk file that is missing or damaged. Thread-safe.
  void read(int64_t first, std::span<int32_t> out) const;
  void read(int64_t first, std::span<int64_t> out) const;
  /// Throws Error naming a chunk file of the first `tokens` that is missing: better now than when it is its turn.
  void check_complete(int64_t tokens) const;

  struct Impl;

 private:
  explicit TokenStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct BuildOptions {
  int64_t threads = 0;                        ///< that encode; 0: one a core. The store is the same for any number
  double save_interval_s = 10;                ///< how much work a kill may cost
  bool replace = true;                        ///< a store of other text or tokenizer; false: that is an Error
  std::function<void()> on_found = nullptr;   ///< called when the store is there already
  std::function<void()> on_resume = nullptr;  ///< called when it goes on where a killed build had come to
  std::function<void()> on_save = nullptr;    ///< called when it has saved how far it has come
};

/// Files and folders of text and of JSON lines (corpus_files.h) → documents → tokens → a store at `dir`. Does nothing
/// when `dir` already holds the store of the same files (sizes, times, contents' hash) and tokenizer. Built beside and
/// renamed; a build that was killed goes on from what it saved last and ends with the same bytes. Memory does not grow
/// with the text (CorpusReader says what it holds). Shows a progress bar when it takes more than a moment. Once
/// interrupted() it saves and throws an Error with exit code 130.
/// Throws Error for sources that are missing or hold no text file, for lines that are not JSON, when `dir` holds
/// something else than a token store, and, unless options.replace, another one than this.
TokenStore build_token_store(const std::vector<std::filesystem::path>& sources, const Tokenizer& tokenizer,
                             const std::filesystem::path& dir, const BuildOptions& options = {});

}  // namespace fox::data
