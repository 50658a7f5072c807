#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace fox::data {

/// Strings with a number each, by their bytes: finds those that a text begins with in one walk.
class PrefixTree {
 public:
  /// Keys are distinct and not empty, values not negative.
  explicit PrefixTree(std::vector<std::pair<std::string_view, int32_t>> keys = {});

  bool empty() const { return nodes_.size() == 1; }
  /// Calls take(length, value) for each key that `text` begins with, the shortest first.
  template <typename Take>
  void prefixes_of(std::string_view text, const Take& take) const {
    const Node* node = &nodes_[0];
    for (size_t length = 0; length < text.size();) {
      const uint8_t* labels = labels_.data() + node->first_child;
      const uint32_t child = index_of(static_cast<uint8_t>(text[length]), labels, node->children);
      if (child == node->children) return;
      node = &nodes_[node->first_child + child];
      ++length;
      if (node->value >= 0) take(length, node->value);
    }
  }
  /// Bytes of the longest key that `text` begins with, or 0.
  size_t longest_prefix_of(std::string_view text) const {
    size_t longest = 0;
    prefixes_of(text, [&](size_t length, int32_t) { longest = length; });
    return longest;
  }

 private:
  /// Its children stand side by side in nodes_, in the order of their bytes.
  struct Node {
    uint32_t first_child = 0, children = 0;
    int32_t value = -1;
  };
  /// Where `label` stands among `count` of them; `count` when it does not.
  static uint32_t index_of(uint8_t label, const uint8_t* labels, uint32_t count) {
    // Most nodes have a few children, for whom a call is too much.
    if (count <= 8) {
      uint32_t i = 0;
      while (i < count && labels[i] != label) ++i;
      return i;
    }
    const void* found = std::memchr(labels, label, count);
    return found == nullptr ? count : static_cast<uint32_t>(static_cast<const uint8_t*>(found) - labels);
  }

  std::vector<Node> nodes_;
  std::vector<uint8_t> labels_;  // the byte that leads to a node
};

}  // namespace fox::data
