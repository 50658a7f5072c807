#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace fox::data {

/// GPT-2 writes every byte as a printable character: those that print stand for themselves, the others are the
/// characters from U+0100 on, in order (so a space is U+0120, 'Ġ'). Vocabularies and merges are stored so.

/// The byte whose id is `rank` in GPT-2's vocabulary: first those that stand for themselves, then the others.
uint8_t byte_of_rank(int rank);

/// Bytes → UTF-8 in that alphabet.
std::string to_alphabet(std::string_view bytes);
/// The inverse; nothing when `text` holds any other character.
std::optional<std::string> from_alphabet(std::string_view text);

}  // namespace fox::data
