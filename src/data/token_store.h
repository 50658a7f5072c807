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
class TokenStore {
 public:
  static TokenStore open(const std::filesystem::path& dir);
  ~TokenStore();
  TokenStore(TokenStore&&) noexcept;

  int64_t num_tokens() const;
  int64_t num_documents() const;
  std::span<const int64_t> doc_offsets() const;
  const std::string& tokenizer_fingerprint() const;
  /// Tokens [first, first + out.size()); throws naming the chunk file that is missing or damaged.
  void read(int64_t first, std::span<int32_t> out) const;

 private:
  struct Impl;
  explicit TokenStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// Text files and folders (searched for *.txt, sorted by path) → one document a file → tokens → a store at `dir`. Does nothing
/// when `dir` already holds the store of the same files (sizes, times, contents' hash) and tokenizer. Built beside and renamed.
TokenStore build_token_store(const std::vector<std::filesystem::path>& sources, const Tokenizer& tokenizer,
                             const std::filesystem::path& dir);

}  // namespace fox::data
