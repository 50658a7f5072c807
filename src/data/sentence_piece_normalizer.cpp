#include "data/sentence_piece_normalizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "data/utf8.h"

namespace fox::data {

namespace {

// A unit of darts-clone 0.32.
bool has_leaf(uint32_t unit) { return (unit >> 8 & 1) != 0; }
uint32_t value_of(uint32_t unit) { return unit & 0x7FFFFFFFu; }
uint32_t label_of(uint32_t unit) { return unit & 0x800000FFu; }
uint32_t offset_of(uint32_t unit) { return unit >> 10 << ((unit & 1u << 9) >> 6); }

PrefixTree kept_pieces(const SentencePieceModel& model) {
  std::vector<std::pair<std::string_view, int32_t>> keys;
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    if (model.pieces[id].kind == SentencePiece::kUserDefined)
      keys.emplace_back(model.pieces[id].text, static_cast<int32_t>(id));
  }
  return PrefixTree(std::move(keys));
}

}  // namespace

PrecompiledRules::PrecompiledRules(std::string_view charsmap, const std::string& source) {
  if (charsmap.empty()) return;
  uint32_t bytes = 0;
  if (charsmap.size() > sizeof(bytes)) std::memcpy(&bytes, charsmap.data(), sizeof(bytes));
  if (bytes == 0 || bytes % sizeof(uint32_t) != 0 || bytes >= charsmap.size() - sizeof(bytes) ||
      charsmap.back() != '\0') {
    throw Error(source + " has a damaged precompiled_charsmap", "fetch or make the file again");
  }
  charsmap.remove_prefix(sizeof(bytes));
  units_.resize(bytes / sizeof(uint32_t));
  std::memcpy(units_.data(), charsmap.data(), bytes);
  replacements_ = charsmap.substr(bytes);
}

PrecompiledRules::Match PrecompiledRules::longest_match(std::string_view text) const {
  Match match;
  if (units_.empty()) return match;
  uint32_t node = offset_of(units_[0]);
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<uint8_t>(text[i]);
    node ^= byte;
    // Bounds and zero bytes are looked after here: the rules come from a file.
    if (node >= units_.size() || label_of(units_[node]) != byte) break;
    const uint32_t unit = units_[node];
    node ^= offset_of(unit);
    if (!has_leaf(unit)) continue;
    if (node >= units_.size() || value_of(units_[node]) >= replacements_.size()) break;
    match = {i + 1, replacements_.c_str() + value_of(units_[node])};
  }
  return match;
}

SentencePieceNormalizer::SentencePieceNormalizer(const SentencePieceModel& model, const std::string& source)
    : rules_(model.rules), precompiled_(model.rules.charsmap, source), kept_(kept_pieces(model)) {}

SentencePieceNormalizer::Step SentencePieceNormalizer::next(std::string_view text) const {
  if (!kept_.empty()) {
    const size_t length = kept_.longest_prefix_of(text);
    if (length > 0) return {text.substr(0, length), length};
  }
  const PrecompiledRules::Match match = precompiled_.longest_match(text);
  if (match.length > 0) return {match.replacement, match.length};
  const size_t length = character_length(text);
  if (length == 0) return {"\xEF\xBF\xBD", 1};
  return {text.substr(0, length), length};
}

std::string SentencePieceNormalizer::operator()(std::string_view text) const {
  std::string out;
  const bool trim = rules_.remove_extra_whitespaces;
  while (trim && !text.empty()) {
    const Step step = next(text);
    if (step.becomes != " ") break;
    text.remove_prefix(step.length);
  }
  if (text.empty()) return out;
  const std::string_view space = rules_.escape_whitespaces ? kSpaceSymbol : " ";
  out.reserve(text.size() + text.size() / 2 + 2 * space.size());
  if (rules_.add_dummy_prefix && !rules_.whitespace_as_suffix) out += space;
  for (bool behind_space = trim; !text.empty();) {
    Step step = next(text);
    text.remove_prefix(step.length);
    while (behind_space && step.becomes.starts_with(' ')) step.becomes.remove_prefix(1);
    for (size_t begin = 0; begin < step.becomes.size();) {
      const size_t end = std::min(step.becomes.find(' ', begin), step.becomes.size());
      out.append(step.becomes, begin, end - begin);
      if (end < step.becomes.size()) out += space;
      begin = end + 1;
    }
    if (!step.becomes.empty()) behind_space = trim && step.becomes.ends_with(' ');
  }
  while (trim && out.ends_with(space)) out.erase(out.size() - space.size());
  if (rules_.add_dummy_prefix && rules_.whitespace_as_suffix) out += space;
  return out;
}

}  // namespace fox::data
