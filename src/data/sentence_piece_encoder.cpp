#include "data/sentence_piece_encoder.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>

#include "base/error.h"

namespace fox::data {

namespace {

/// How much less likely than the least likely piece an unknown character is.
constexpr float kUnknownPenalty = 10;
/// What a user-defined piece scores less than nothing, whatever its length.
constexpr double kUserDefinedPenalty = 0.1;

void check_size(std::string_view text) {
  if (text.size() < std::numeric_limits<uint32_t>::max()) return;
  throw Error(fmt::format("a text of {} bytes is too long to encode", text.size()), "cut it into documents");
}

/// Bytes of the character at the start of `text`, by its first byte alone.
size_t character_size(std::string_view text) {
  constexpr uint8_t kSizes[] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4};
  return std::min<size_t>(kSizes[static_cast<uint8_t>(text[0]) >> 4], text.size());
}

PrefixTree tree_of(const SentencePieceModel& model) {
  std::vector<std::pair<std::string_view, int32_t>> keys;
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    if (model.pieces[id].in_text()) keys.emplace_back(model.pieces[id].text, static_cast<int32_t>(id));
  }
  return PrefixTree(std::move(keys));
}

}  // namespace

UnigramEncoder::UnigramEncoder(const SentencePieceModel& model) : model_(model), tree_(tree_of(model)) {
  float smallest = std::numeric_limits<float>::max();
  largest_score_ = std::numeric_limits<float>::min();
  for (const SentencePiece& piece : model.pieces) {
    const bool normal = piece.kind == SentencePiece::kNormal;
    scores_.push_back(normal ? piece.score : std::numeric_limits<double>::quiet_NaN());
    if (!normal) continue;
    smallest = std::min(smallest, piece.score);
    largest_score_ = std::max(largest_score_, piece.score);
  }
  unknown_score_ = smallest - kUnknownPenalty;
}

void UnigramEncoder::encode(std::string_view text, std::vector<FoundPiece>& out) const {
  check_size(text);
  std::vector<Best> best(text.size() + 1);
  for (size_t at = 0, character; at < text.size(); at += character) {
    character = character_size(text.substr(at));
    const float so_far = best[at].score;
    const auto offer = [&](size_t length, int32_t id, auto score) {
      Best& target = best[at + length];
      if (target.begin != kNowhere && !(score > target.score)) return;
      target = {static_cast<float>(score), id, static_cast<uint32_t>(at)};
    };
    bool has_character = false;
    tree_.prefixes_of(text.substr(at), [&](size_t length, int32_t id) {
      const double score = scores_[static_cast<size_t>(id)];
      if (!std::isnan(score)) {
        offer(length, id, score + so_far);
      } else if (model_.pieces[static_cast<size_t>(id)].kind == SentencePiece::kUserDefined) {
        offer(length, id, static_cast<float>(length) * largest_score_ - kUserDefinedPenalty + so_far);
      } else {
        return;
      }
      has_character = has_character || length == character;
    });
    if (!has_character) offer(character, model_.unknown, unknown_score_ + so_far);
  }
  const size_t before = out.size();
  for (size_t end = text.size(); end > 0; end = best[end].begin) {
    out.push_back({text.substr(best[end].begin, end - best[end].begin), best[end].id});
  }
  std::reverse(out.begin() + static_cast<ptrdiff_t>(before), out.end());
}

MergeEncoder::MergeEncoder(const SentencePieceModel& model, const PrefixTree& kept) : model_(model), kept_(kept) {
  bool holds_inner_spaces = false, has_unused = false;
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    const SentencePiece& piece = model.pieces[id];
    (piece.in_text() ? pieces_ : others_).emplace(piece.text, static_cast<int32_t>(id));
    if (!piece.in_text()) continue;
    size_t spaces = 0;
    while (std::string_view(piece.text).substr(spaces).starts_with(kSpaceSymbol)) spaces += kSpaceSymbol.size();
    holds_inner_spaces = holds_inner_spaces || piece.text.find(kSpaceSymbol, spaces) != std::string::npos;
    has_unused = has_unused || piece.kind == SentencePiece::kUnused;
  }
  // In models as they are usually trained, pieces hold spaces at their beginning only: then what lies before a space is
  // merged without what lies behind it. Unused pieces are cut as they were last merged, anywhere in a text, and unknown
  // ones that stand together are one.
  has_words_ = !holds_inner_spaces && !has_unused && pieces_.contains(kSpaceSymbol);
}

size_t MergeEncoder::word_end(std::string_view text) const {
  if (!has_words_) return text.size();
  size_t at = 0;
  while (text.substr(at).starts_with(kSpaceSymbol)) at += kSpaceSymbol.size();
  return std::min(text.find(kSpaceSymbol, at), text.size());
}

std::vector<MergeEncoder::Part> MergeEncoder::split(std::string_view text) const {
  check_size(text);
  std::vector<Part> parts;
  while (!text.empty()) {
    const size_t kept = kept_.longest_prefix_of(text), size = kept > 0 ? kept : character_size(text);
    const auto index = static_cast<uint32_t>(parts.size());  // index - 1 of the first is kNone
    parts.push_back({text.substr(0, size), index - 1, index + 1, kept > 0});
    text.remove_prefix(size);
  }
  if (!parts.empty()) parts.back().next = kNone;
  return parts;
}

void MergeEncoder::encode(std::string_view text, std::vector<FoundPiece>& out) const {
  std::vector<Part> parts = split(text);
  std::priority_queue<Pair> queue;
  Halves halves;  // of unused pieces
  const auto consider = [&](uint32_t left, uint32_t right) {
    if (left == kNone || right == kNone || parts[left].kept || parts[right].kept) return;
    const std::string_view both(parts[left].text.data(), parts[left].text.size() + parts[right].text.size());
    const auto it = pieces_.find(both);
    if (it == pieces_.end()) return;
    const SentencePiece& piece = model_.pieces[static_cast<size_t>(it->second)];
    queue.push({piece.score, left, right, both.size()});
    if (piece.kind == SentencePiece::kUnused) halves[both] = {parts[left].text, parts[right].text};
  };
  for (uint32_t i = 1; i < parts.size(); ++i) consider(i - 1, i);
  while (!queue.empty()) {
    const Pair pair = queue.top();
    queue.pop();
    Part &left = parts[pair.left], &right = parts[pair.right];
    // Pairs are not taken out when another merge outdates them: they no longer agree with the list.
    if (left.text.empty() || right.text.empty() || left.text.size() + right.text.size() != pair.size) continue;
    left.text = {left.text.data(), pair.size};
    left.next = right.next;
    if (right.next != kNone) parts[right.next].previous = pair.left;
    right.text = {};
    consider(left.previous, pair.left);
    consider(pair.left, left.next);
  }
  for (uint32_t i = parts.empty() ? kNone : 0; i != kNone; i = parts[i].next) put(parts[i].text, halves, out);
}

void MergeEncoder::put(std::string_view text, const Halves& halves, std::vector<FoundPiece>& out) const {
  int32_t id = model_.unknown;
  if (const auto other = others_.find(text); other != others_.end()) {
    id = other->second;
  } else if (const auto found = pieces_.find(text); found != pieces_.end()) {
    id = found->second;
  }
  const bool unused = model_.pieces[static_cast<size_t>(id)].kind == SentencePiece::kUnused;
  const auto cut = unused ? halves.find(text) : halves.end();
  if (cut == halves.end()) return out.push_back({text, id});
  put(cut->second.first, halves, out);
  put(cut->second.second, halves, out);
}

}  // namespace fox::data
