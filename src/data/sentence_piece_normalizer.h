#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/prefix_tree.h"
#include "data/sentence_piece_model.h"

namespace fox::data {

/// Rules "these bytes become those" as SentencePiece compiles them (precompiled_charsmap): a double-array trie of
/// darts-clone that leads to places in a list of strings, each ended by a zero byte.
class PrecompiledRules {
 public:
  /// Throws Error naming `source` when `charsmap` is neither empty nor such rules.
  PrecompiledRules(std::string_view charsmap, const std::string& source);
  struct Match {
    size_t length = 0;  ///< of the longest beginning of the text that has a rule; 0: none has
    std::string_view replacement;
  };
  Match longest_match(std::string_view text) const;

 private:
  std::vector<uint32_t> units_;
  std::string replacements_;
};

/// Text as the pieces see it. Bytes that are no valid UTF-8 become U+FFFD each. Thread-safe.
class SentencePieceNormalizer {
 public:
  SentencePieceNormalizer(const SentencePieceModel& model, const std::string& source);
  std::string operator()(std::string_view text) const;
  /// User-defined pieces, which stay as they are.
  const PrefixTree& kept() const { return kept_; }

 private:
  struct Step {
    std::string_view becomes;
    size_t length;  // of what it was
  };
  Step next(std::string_view text) const;

  SentencePieceRules rules_;
  PrecompiledRules precompiled_;
  PrefixTree kept_;
};

}  // namespace fox::data
