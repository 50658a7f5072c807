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
      if (node->children == 0) return;
      const uint8_t* labels = labels_.data() + node->first_child;
      const void* found = std::memchr(labels, static_cast<uint8_t>(text[length]), node->children);
      if (found == nullptr) return;
      node = &nodes_[node->first_child + static_cast<size_t>(static_cast<const uint8_t*>(found) - labels)];
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
  std::vector<Node> nodes_;
  std::vector<uint8_t> labels_;  // the byte that leads to a node
};

}  // namespace fox::data
