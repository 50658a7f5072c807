#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "data/tokenizer_json.h"

namespace fox::data {

/// A kind of tokenizer. What its functions do, tokenizer.h says.
struct Tokenizer::Impl {
  enum class Kind { kByteLevel, kSentencePiece };

  explicit Impl(Kind the_kind) : kind(the_kind) {}
  virtual ~Impl() = default;
  virtual void encode(std::string_view text, bool allow_special, const IdSink& sink) const = 0;
  virtual std::string decode(std::span<const int32_t> ids, bool continues) const = 0;
  virtual std::unique_ptr<Decoder> decoder(bool continues) const = 0;
  virtual size_t separable_prefix(std::string_view text) const = 0;
  virtual std::string fingerprint() const = 0;
  virtual std::string file() const = 0;  ///< what save() writes
  std::string_view bytes_of(int32_t id) const;

  Kind kind;
  std::vector<std::string> tokens;  ///< the bytes of each id
  int32_t end_of_text = -1;
};

/// Ids that are gathered before a sink sees them.
inline constexpr size_t kIdsAtATime = 1 << 14;

/// Byte-level BPE. `json`: the file as it was read; empty for one that is built in.
std::unique_ptr<Tokenizer::Impl> make_byte_level(TokenizerSpec spec, std::string json);
/// SentencePiece's, from its file. Throws Error naming `source`.
std::unique_ptr<Tokenizer::Impl> make_sentence_piece(std::string file, const std::string& source);

}  // namespace fox::data
