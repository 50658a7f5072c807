#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fox::data {

/// Bytes of the valid character at the start of `text`, or 0 (Unicode standard, table 3-7: overlong forms, surrogates
/// and what is beyond U+10FFFF are not valid).
size_t character_length(std::string_view text);

/// Bytes of the longest prefix of `text` that is valid UTF-8.
size_t valid_utf8_prefix(std::string_view text);

/// Appends a code point below U+110000 that is no surrogate.
void append_utf8(uint32_t code, std::string& out);

}  // namespace fox::data
