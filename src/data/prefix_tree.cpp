#include "data/prefix_tree.h"

#include <algorithm>

namespace fox::data {

PrefixTree::PrefixTree(std::vector<std::pair<std::string_view, int32_t>> keys) : nodes_(1), labels_(1) {
  std::sort(keys.begin(), keys.end());
  struct Range {
    size_t begin, end, depth;  // keys that agree in their first `depth` bytes
  };
  std::vector<Range> ranges = {{0, keys.size(), 0}};  // of each node
  for (size_t i = 0; i < nodes_.size(); ++i) {
    auto [begin, end, depth] = ranges[i];
    if (begin < end && keys[begin].first.size() == depth) nodes_[i].value = keys[begin++].second;
    nodes_[i].first_child = static_cast<uint32_t>(nodes_.size());
    while (begin < end) {
      const char byte = keys[begin].first[depth];
      size_t past = begin;
      while (past < end && keys[past].first[depth] == byte) ++past;
      ++nodes_[i].children;
      nodes_.emplace_back();
      labels_.push_back(static_cast<uint8_t>(byte));
      ranges.push_back({begin, past, depth + 1});
      begin = past;
    }
  }
}

}  // namespace fox::data
