#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/pre_tokenizer.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <array>

#include "base/error.h"
#include "data/utf8.h"

namespace fox::data {

namespace {

struct CodeDeleter {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct MatchDeleter {
  void operator()(pcre2_match_data* match) const { pcre2_match_data_free(match); }
};
using Code = std::unique_ptr<pcre2_code, CodeDeleter>;
using Match = std::unique_ptr<pcre2_match_data, MatchDeleter>;

std::string pcre2_message(int number) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(number, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

/// Rust's and Oniguruma's \s is Unicode's White_Space; PCRE2's also takes U+180E, which Unicode 6.3 moved out of it.
std::string with_unicode_spaces(std::string_view pattern) {
  std::string result;
  for (size_t i = 0; i < pattern.size(); ++i) {
    if (pattern[i] != '\\' || i + 1 == pattern.size()) {
      result += pattern[i];
      continue;
    }
    const char next = pattern[++i];
    if (next == 's') {
      result += "\\p{White_Space}";
    } else if (next == 'S') {
      result += "\\P{White_Space}";
    } else {
      result += {'\\', next};
    }
  }
  return result;
}

Code compile(std::string_view pattern) {
  const std::string source = with_unicode_spaces(pattern);
  int error = 0;
  PCRE2_SIZE at = 0;
  Code code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(source.data()), source.size(), PCRE2_UTF | PCRE2_UCP, &error,
                          &at, nullptr));
  if (!code)
    throw Error(fmt::format("pattern '{}': {}", pattern, pcre2_message(error)), "patterns are read as PCRE2's");
  // Where pages may not be made executable there is no JIT and the interpreter runs: slower, the same matches.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return code;
}

}  // namespace

struct PreTokenizer::Impl {
  std::vector<Code> codes;
};

struct PreTokenizer::Scratch::Impl {
  std::vector<Match> matches;
};

PreTokenizer::PreTokenizer(const std::vector<std::string>& patterns) : impl_(std::make_unique<Impl>()) {
  for (const std::string& pattern : patterns) impl_->codes.push_back(compile(pattern));
}
PreTokenizer::~PreTokenizer() = default;

PreTokenizer::Scratch::Scratch(const PreTokenizer& owner) : impl_(std::make_unique<Impl>()) {
  for (const Code& code : owner.impl_->codes) {
    impl_->matches.emplace_back(pcre2_match_data_create_from_pattern(code.get(), nullptr));
  }
}
PreTokenizer::Scratch::~Scratch() = default;

void PreTokenizer::split(std::string_view text, Scratch& scratch, const Sink& sink) const {
  while (!text.empty()) {
    const size_t valid = valid_utf8_prefix(text);
    if (valid > 0) split_piece(text.substr(0, valid), 0, scratch, sink);
    text.remove_prefix(valid);
    size_t invalid = 0;
    while (invalid < text.size() && character_length(text.substr(invalid)) == 0) ++invalid;
    if (invalid > 0) sink(text.substr(0, invalid));
    text.remove_prefix(invalid);
  }
}

void PreTokenizer::split_piece(std::string_view piece, size_t level, Scratch& scratch, const Sink& sink) const {
  if (level == impl_->codes.size()) return sink(piece);
  pcre2_match_data* match = scratch.impl_->matches[level].get();
  const PCRE2_SIZE* found = pcre2_get_ovector_pointer(match);
  size_t done = 0;
  while (done < piece.size()) {
    const int result = pcre2_match(impl_->codes[level].get(), reinterpret_cast<PCRE2_SPTR>(piece.data()), piece.size(),
                                   done, PCRE2_NOTEMPTY | PCRE2_NO_UTF_CHECK, match, nullptr);
    if (result < 0 && result != PCRE2_ERROR_NOMATCH) {
      throw Error("the tokenizer's pattern cannot be matched: " + pcre2_message(result),
                  "see pre_tokenizer in tokenizer.json");
    }
    const size_t begin = result < 0 ? piece.size() : found[0];
    const size_t end = result < 0 ? piece.size() : found[1];
    if (begin > done) split_piece(piece.substr(done, begin - done), level + 1, scratch, sink);
    if (end > begin) split_piece(piece.substr(begin, end - begin), level + 1, scratch, sink);
    done = end;
  }
}

}  // namespace fox::data
