#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fox::data {

/// The ids of words that were met before. The words of a text follow Zipf's law, so a few megabytes hold most of them.
class WordCache {
 public:
  /// Appends the ids of `word` to `out`: known ones, or those that `encode(word, out)` appends.
  template <typename Encode>
  void append(std::string_view word, std::vector<int32_t>& out, const Encode& encode) {
    if (word.size() > kLongestWord) return encode(word, out);
    if (const auto it = known_.find(word); it != known_.end()) {
      const auto first = ids_.begin() + it->second.first;
      out.insert(out.end(), first, first + it->second.count);
      return;
    }
    const size_t before = out.size();
    encode(word, out);
    // Starting over once in a while costs little.
    if (known_.size() == kMostWords) {
      known_.clear();
      ids_.clear();
    }
    const auto first = static_cast<uint32_t>(ids_.size());
    ids_.insert(ids_.end(), out.begin() + static_cast<ptrdiff_t>(before), out.end());
    known_.emplace(word, Span{first, static_cast<uint32_t>(out.size() - before)});
  }

 private:
  /// Longer words hardly come twice.
  static constexpr size_t kLongestWord = 64, kMostWords = 1 << 16;
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  struct Span {
    uint32_t first, count;
  };
  std::unordered_map<std::string, Span, Hash, std::equal_to<>> known_;
  std::vector<int32_t> ids_;
};

}  // namespace fox::data
