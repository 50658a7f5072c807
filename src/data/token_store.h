#pragma once

#include <cstdint>
#include <filesystem>
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
  /// Throws Error naming the file that is missing or damaged.
  static TokenStore open(const std::filesystem::path& dir);
  ~TokenStore();
  TokenStore(TokenStore&&) noexcept;

  int64_t num_tokens() const;
  int64_t num_documents() const;
  std::span<const int64_t> doc_offsets() const;
  const std::string& tokenizer_fingerprint() const;
  /// Tokens [first, first + out.size()); throws naming the chunk file that is missing or damaged. Thread-safe.
  void read(int64_t first, std::span<int32_t> out) const;

 private:
  struct Impl;
  explicit TokenStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Text files and folders (searched for *.txt, sorted by path) → one document a file → tokens → a store at `dir`. Does
/// nothing when `dir` already holds the store of the same files (sizes, times, contents' hash) and tokenizer. Built
/// beside and renamed; memory does not grow with the text. Shows a progress bar when it takes more than a moment.
/// Throws Error for sources that are missing or hold no text file, and when `dir` holds something else than a token
/// store.
TokenStore build_token_store(const std::vector<std::filesystem::path>& sources, const Tokenizer& tokenizer,
                             const std::filesystem::path& dir);

}  // namespace fox::data
