#pragma once

#include <span>
#include <string>
#include <string_view>

namespace fox {

/// The candidate with the fewest edits to `word` (insert, delete, replace, swap of neighbours), or "" when none is
/// close enough to be what was meant (more than a third of the word, and more than two edits).
std::string nearest(std::string_view word, std::span<const std::string> candidates);

/// "did you mean 'X'?" for the nearest candidate, else "known: a, b, c".
std::string suggest(std::string_view word, std::span<const std::string> candidates);

}  // namespace fox
