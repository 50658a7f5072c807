#pragma once

#include <string>
#include <string_view>

namespace fox::data {

// LongCrawl64 was made of text that was first written as a JSON string: every character outside 0x20-0x7E is an escape,
// as Python's json.dumps writes it with ensure_ascii, without the quotes around it.

/// Appends `text` as such a string. A byte that is no part of valid UTF-8 is written as U+FFFD.
void append_json_escaped(std::string_view text, std::string& out);

/// The inverse, by the rules of the published tokenizer: what is a strict JSON string is read as one; anything else as
/// Python's "unicode_escape" with errors ignored does (bytes from 0x80 on are Latin-1, unknown escapes stay, malformed
/// ones are dropped; so are \N{names}, whose table is not here). Surrogates without their other half are dropped.
std::string json_unescaped(std::string_view escaped);

/// The same for text that comes in pieces: an escape that is not whole yet is held back. As it cannot know whether the
/// whole will be strict JSON, it reads JSON's escapes and leaves all else as it is.
class JsonUnescaper {
 public:
  /// Returns what is settled after this piece.
  std::string push(std::string_view piece);
  /// No more will come: returns what is left of what was held back.
  std::string finish();

 private:
  std::string settle(bool ended);
  std::string pending_;
};

}  // namespace fox::data
