#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fox::data {

/// How SentencePiece writes a space within pieces: U+2581.
inline constexpr std::string_view kSpaceSymbol = "\xE2\x96\x81";

/// A piece of the vocabulary. Of these kinds control and unknown stand for no text of their own, a byte piece for a
/// byte of what has no other piece; user-defined ones are always taken whole; unused ones are cut again.
struct SentencePiece {
  enum Kind : int64_t { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
  std::string text;
  float score = 0;
  Kind kind = kNormal;
  /// Whether it can be found in text.
  bool in_text() const { return kind == kNormal || kind == kUserDefined || kind == kUnused; }
};

/// How text is changed before it is cut.
struct SentencePieceRules {
  std::string charsmap;  ///< Unicode rules, compiled: empty, or as PrecompiledRules (sentence_piece_normalizer.h) reads
  bool add_dummy_prefix = true;          ///< a space before the text
  bool remove_extra_whitespaces = true;  ///< at both ends, and all but one within
  bool escape_whitespaces = true;        ///< kSpaceSymbol for a space
  bool whitespace_as_suffix = false;     ///< the added space stands behind the text
};

/// What decides an encoding in a .model file, sentencepiece's ModelProto (sentencepiece_model.proto).
struct SentencePieceModel {
  std::vector<SentencePiece> pieces;  ///< by id
  bool bpe = false;                   ///< merges; else the likeliest pieces of a unigram model
  bool byte_fallback = false;         ///< what has no piece becomes byte pieces, not the unknown one
  int32_t unknown = -1;
  int32_t begin = -1;             ///< <s>; -1: has none
  int32_t end = -1;               ///< </s>; -1: has none
  std::string unknown_surface;    ///< what the unknown piece is decoded to
  std::vector<int32_t> byte_ids;  ///< of the 256 bytes, with byte_fallback
  SentencePieceRules rules;
};

/// Throws Error naming `source` for what is no such file, is damaged, or would be encoded otherwise here than by
/// sentencepiece.
SentencePieceModel parse_sentence_piece_model(std::string_view file, const std::string& source);

}  // namespace fox::data
