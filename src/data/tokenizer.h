#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fox::data {

using IdSink = std::function<void(std::span<const int32_t> ids)>;

/// Text → ids → text, in one of two kinds.
///
/// Byte-level byte-pair encoding in GPT-2's layout: ids 0..255 are bytes (in GPT-2's order), then one id a merge, then
/// <|endoftext|>, which stands before each document. With no merges it is a tokenizer of raw bytes. Merges never cross
/// the words that GPT-2's pattern finds in UTF-8 text. A run of bytes that are not valid UTF-8 is a word of its own, so
/// every byte string can be encoded and comes back whole.
///
/// SentencePiece's unigram and BPE models, which change text by rules of their own first: it comes back as those left
/// it. <s>, or </s> where there is none, stands before each document.
class Tokenizer {
 public:
  /// The first `num_merges` GPT-2 merges (at most 50,000 = GPT-2's own vocabulary of 50,257 ids).
  static Tokenizer gpt2(int64_t num_merges = 50000);
  /// GPT-2's encoding of text that is first written as a JSON string (json_escape.h): the tokenizer of LongCrawl64 and
  /// of the models published with it. Only valid UTF-8 comes back as it was.
  static Tokenizer gpt2_json();
  /// Reads a tokenizer.json (byte-level BPE) as Hugging Face's `tokenizers` writes it, or a .model file (that is how
  /// its name must end) as SentencePiece does. Throws Error naming the file and the key for what is damaged and for
  /// what would encode otherwise here than there (normalizers, other models, …).
  static Tokenizer load(const std::filesystem::path& file);
  /// The tokenizer of a model folder: its tokenizer.model, or else its tokenizer.json; "" when neither is there.
  static std::filesystem::path find_in(const std::filesystem::path& dir);
  /// Writes a tokenizer.json that the `tokenizers` library reads and that encodes the same; a loaded file as it was
  /// read.
  void save(const std::filesystem::path& file) const;
  /// The same, in a model folder, under the name that find_in() looks for.
  void save_in(const std::filesystem::path& dir) const;

  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  /// Any bytes, valid UTF-8 or not; special tokens in the text are text unless `allow_special`. Thread-safe.
  std::vector<int32_t> encode(std::string_view text, bool allow_special = false) const;
  /// The same ids in pieces of some thousands, so that the ids of a long text need not fit in memory.
  void encode(std::string_view text, const IdSink& sink, bool allow_special = false) const;
  /// The bytes of the ids (special tokens give nothing). Of a byte-level tokenizer decode(encode(s)) == s for every
  /// byte string, or for every text where it is escaped. SentencePiece's puts a space before a text and takes it away
  /// here, unless the ids continue a text. Throws Error for an id outside the vocabulary.
  std::string decode(std::span<const int32_t> ids, bool continues = false) const;

  /// The same for ids that come one by one.
  class Decoder {
   public:
    virtual ~Decoder() = default;
    /// The bytes that are settled after this id.
    virtual std::string push(int32_t id) = 0;
    /// No more will come: returns what was held back.
    virtual std::string finish() { return {}; }
  };
  /// Must not outlive the tokenizer.
  std::unique_ptr<Decoder> decoder(bool continues = false) const;

  /// The bytes of one id; still escaped where text is, a space where SentencePiece has its symbol for one.
  std::string_view bytes_of(int32_t id) const;

  /// The longest beginning of `text` that is encoded to the same ids with or without what follows: a place to cut a
  /// long text between threads. 0 where there is none, or where the tokenizer's words are not GPT-2's.
  size_t separable_prefix(std::string_view text) const;

  int64_t vocab_size() const;   ///< including <|endoftext|>
  int32_t end_of_text() const;  ///< id that starts each document and each context
  /// A short hash of everything that decides the encoding: stored with token stores and models.
  std::string fingerprint() const;

  struct Impl;

 private:
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace fox::data
