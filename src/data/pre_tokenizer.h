#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fox::data {

/// GPT-2's pattern of words (radford2019, encoder.py).
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// Cuts text into the words that merges never cross. Each pattern cuts the pieces that the one before it left: a match
/// is a piece, and so is what lies between two matches. Patterns see UTF-8; a run of bytes that are not valid UTF-8
/// (here as in Python: overlong forms, surrogates, and beyond U+10FFFF are not) is a word of its own and ends the text
/// before it.
class PreTokenizer {
 public:
  using Sink = std::function<void(std::string_view word)>;

  /// Throws Error for a pattern that is no regular expression.
  explicit PreTokenizer(const std::vector<std::string>& patterns);
  ~PreTokenizer();

  /// Memory of one thread at work.
  class Scratch {
   public:
    explicit Scratch(const PreTokenizer& owner);
    ~Scratch();

   private:
    friend class PreTokenizer;
    struct Impl;
    std::unique_ptr<Impl> impl_;
  };

  void split(std::string_view text, Scratch& scratch, const Sink& sink) const;

 private:
  void split_piece(std::string_view piece, size_t level, Scratch& scratch, const Sink& sink) const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fox::data
