#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/added_tokens.h"
#include "data/bpe.h"

namespace fox::data {

/// Everything that decides an encoding.
struct TokenizerSpec {
  std::vector<std::string> tokens;  ///< the bytes of each id; empty for added tokens and for ids that stand for nothing
  std::vector<Merge> merges;        ///< best first
  std::vector<AddedToken> added;    ///< by id
  std::vector<std::string> patterns;
  bool json_escaped = false;   ///< text is written as a JSON string before it is encoded (json_escape.h)
  bool ignore_merges = false;  ///< a word that is a token is that token, whatever the merges say
  int32_t end_of_text = -1;
};

/// Reads Hugging Face's tokenizer.json. What would encode otherwise here than there (normalizers, other models, …) is
/// refused. Throws Error naming `source` and the key.
TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& source);

/// The inverse. The format has no word for `json_escaped`; a member "json_escaped" of pre_tokenizer, which the
/// `tokenizers` library passes over, says it.
std::string to_tokenizer_json(const TokenizerSpec& spec);

}  // namespace fox::data
