#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fox::data {

/// Byte-level byte-pair encoding in GPT-2's layout: ids 0..255 are bytes (in GPT-2's order), then one id a merge, then
/// <|endoftext|>, which stands before each document. With no merges it is a tokenizer of raw bytes.
class Tokenizer {
 public:
  /// The first `num_merges` GPT-2 merges (at most 50,000 = GPT-2's own vocabulary of 50,257 ids).
  static Tokenizer gpt2(int64_t num_merges = 50000);
  /// Reads a tokenizer.json (byte-level BPE) as Hugging Face's `tokenizers` writes it.
  static Tokenizer load(const std::filesystem::path& tokenizer_json);
  /// Writes a tokenizer.json that the `tokenizers` library reads and that encodes the same.
  void save(const std::filesystem::path& tokenizer_json) const;

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  /// Any bytes, valid UTF-8 or not; special tokens in the text are text unless `allow_special`. Thread-safe.
  std::vector<int32_t> encode(std::string_view text, bool allow_special = false) const;
  /// The bytes of the ids (special tokens give nothing); decode(encode(s)) == s for every byte string.
  std::string decode(std::span<const int32_t> ids) const;
  /// The bytes of one id.
  std::string_view bytes_of(int32_t id) const;

  int64_t vocab_size() const;        ///< including <|endoftext|>
  int32_t end_of_text() const;       ///< id that starts each document and each context
  /// A short hash of everything that decides the encoding: stored with token stores and models.
  std::string fingerprint() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fox::data
