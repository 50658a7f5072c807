#pragma once

#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "data/prefix_tree.h"
#include "data/sentence_piece_model.h"

namespace fox::data {

// Both cut normalized text into pieces, and equal sentencepiece's own: floats are added in its order and width, and
// what scores the same is decided as there. What has no piece is the unknown one, a character each. Thread-safe;
// `model` must outlive them.

/// A part of the text, and its id.
struct FoundPiece {
  std::string_view text;
  int32_t id;
};

/// The pieces whose scores, logarithms of probabilities, have the largest sum (Kudo 2018; Viterbi's algorithm).
class UnigramEncoder {
 public:
  explicit UnigramEncoder(const SentencePieceModel& model);
  /// Appends the pieces of `text` to `out`.
  void encode(std::string_view text, std::vector<FoundPiece>& out) const;

 private:
  /// The best way to come to a place in the text: its score, and its last piece.
  struct Best {
    float score = 0;
    int32_t id = -1;
    uint32_t begin = kNowhere;
  };
  static constexpr uint32_t kNowhere = 0xFFFFFFFF;

  const SentencePieceModel& model_;
  PrefixTree tree_;
  std::vector<double>
      scores_;  // of the normal pieces; of others NaN. Beside each other, for they are read all the time
  float unknown_score_, largest_score_;
};

/// Neighbours become one as long as there is a piece for both, those of the best score and then the leftmost first,
/// beginning with characters (Sennrich, Haddow and Birch 2016).
class MergeEncoder {
 public:
  /// `kept`: the user-defined pieces, which are not merged.
  MergeEncoder(const SentencePieceModel& model, const PrefixTree& kept);
  /// Appends the pieces of `text` to `out`.
  void encode(std::string_view text, std::vector<FoundPiece>& out) const;
  /// Where the word at the start of `text` ends: no piece holds a character of two words.
  size_t word_end(std::string_view text) const;

 private:
  /// The parts of the text as a list.
  struct Part {
    std::string_view text;  // empty: it is in the one before
    uint32_t previous, next;
    bool kept;
  };
  struct Pair {
    float score;
    uint32_t left, right;
    size_t size;
    bool operator<(const Pair& other) const {  // for a queue that gives the largest
      return score < other.score || (score == other.score && left > other.left);
    }
  };
  using Halves = std::unordered_map<std::string_view, std::pair<std::string_view, std::string_view>>;
  static constexpr uint32_t kNone = 0xFFFFFFFF;

  std::vector<Part> split(std::string_view text) const;
  void put(std::string_view text, const Halves& halves, std::vector<FoundPiece>& out) const;

  const SentencePieceModel& model_;
  const PrefixTree& kept_;
  std::unordered_map<std::string_view, int32_t> pieces_, others_;  // that are found in text; that stand for none
  bool has_words_;
};

}  // namespace fox::data
