#include "base/nearest.h"

#include <algorithm>
#include <vector>

namespace fox {
namespace {

// Optimal string alignment distance: a swap of neighbours, the commonest slip of all, counts once.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) d[i][0] = i;
  for (size_t j = 0; j <= b.size(); ++j) d[0][j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

}  // namespace

std::string nearest(std::string_view word, std::span<const std::string> candidates) {
  const std::string* best = nullptr;
  size_t fewest = std::max<size_t>(2, word.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    if (const size_t distance = edit_distance(word, candidate); distance < fewest) {
      fewest = distance;
      best = &candidate;
    }
  }
  return best ? *best : "";
}

std::string suggest(std::string_view word, std::span<const std::string> candidates) {
  if (const auto match = nearest(word, candidates); !match.empty()) return "did you mean '" + match + "'?";
  std::string known = "known: ";
  for (size_t i = 0; i < candidates.size(); ++i) known += (i ? ", " : "") + candidates[i];
  return known;
}

}  // namespace fox
