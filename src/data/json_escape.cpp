#include "data/json_escape.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "data/utf8.h"

namespace fox::data {

namespace {

constexpr std::string_view kHexDigits = "0123456789abcdef";

bool is_high_surrogate(uint32_t unit) { return unit >= 0xD800 && unit < 0xDC00; }
bool is_low_surrogate(uint32_t unit) { return unit >= 0xDC00 && unit < 0xE000; }
uint32_t joined(uint32_t high, uint32_t low) { return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00); }

void append_unit(uint32_t unit, std::string& out) {
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kHexDigits[unit >> shift & 0xF];
}

/// Short escapes of JSON: what stands behind the backslash, or 0.
char short_escape(char c) {
  switch (c) {
    case '\n':
      return 'n';
    case '\t':
      return 't';
    case '\r':
      return 'r';
    case '\b':
      return 'b';
    case '\f':
      return 'f';
    case '"':
    case '\\':
      return c;
    default:
      return 0;
  }
}

/// The inverse of short_escape.
std::optional<char> short_unescape(char c) {
  constexpr std::string_view kNames = "ntrbf\"\\", kValues = "\n\t\r\b\f\"\\";
  const size_t i = kNames.find(c);
  return i == std::string_view::npos ? std::nullopt : std::optional(kValues[i]);
}

uint32_t decode_character(std::string_view character) {
  constexpr std::array<uint8_t, 5> kLeadBits = {0, 0x7F, 0x1F, 0x0F, 0x07};
  uint32_t code = static_cast<uint8_t>(character[0]) & kLeadBits[character.size()];
  for (const char c : character.substr(1)) code = code << 6 | (static_cast<uint8_t>(c) & 0x3F);
  return code;
}

struct Hex {
  uint32_t value;
  size_t digits;
};

/// The number at the start of `text`, of at most `most` digits of base 2^bits.
Hex read_digits(std::string_view text, size_t most, int bits) {
  Hex hex{0, 0};
  while (hex.digits < most && hex.digits < text.size()) {
    const char c = text[hex.digits];
    const char lower = c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
    const size_t digit = kHexDigits.find(lower);
    if (digit >= size_t{1} << bits) break;
    hex.value = hex.value << bits | static_cast<uint32_t>(digit);
    ++hex.digits;
  }
  return hex;
}

/// `text` begins with \u and four digits.
bool is_unit(std::string_view text) { return text.starts_with("\\u") && read_digits(text.substr(2), 4, 4).digits == 4; }

void append_code(uint32_t code, std::string& out) {
  if (!is_high_surrogate(code) && !is_low_surrogate(code)) append_utf8(code, out);
}

/// The code point of the \u escape at the start of `text` and its length: two escapes for a pair of surrogates.
Hex read_unit(std::string_view text) {
  const uint32_t unit = read_digits(text.substr(2), 4, 4).value;
  if (is_high_surrogate(unit) && is_unit(text.substr(6))) {
    const uint32_t low = read_digits(text.substr(8), 4, 4).value;
    if (is_low_surrogate(low)) return {joined(unit, low), 12};
  }
  return {unit, 6};
}

/// `text` begins with a backslash, and what follows it decides how it is to be read.
bool may_grow(std::string_view text) {
  if (text.size() < 2) return true;
  if (text[1] != 'u') return false;
  if (!is_unit(text)) return 2 + read_digits(text.substr(2), 4, 4).digits == text.size();
  if (!is_high_surrogate(read_digits(text.substr(2), 4, 4).value)) return false;
  const std::string_view second = text.substr(6);
  return second.empty() || (second[0] == '\\' && second.size() < 6 && may_grow(second));
}

/// `text` as a strict JSON string, or nothing.
std::optional<std::string> read_strict(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c == '"' || static_cast<uint8_t>(c) < 0x20) return std::nullopt;
    if (c != '\\') {
      out += c;
      ++i;
    } else if (is_unit(text.substr(i))) {
      const Hex unit = read_unit(text.substr(i));
      append_code(unit.value, out);
      i += unit.digits;
    } else {
      if (i + 1 == text.size()) return std::nullopt;
      const auto value = text[i + 1] == '/' ? '/' : short_unescape(text[i + 1]);
      if (!value) return std::nullopt;
      out += *value;
      i += 2;
    }
  }
  return out;
}

/// Reads the escape at the start of `text` as unicode_escape does; returns its length.
size_t read_python_escape(std::string_view text, std::string& out) {
  if (text.size() == 1) return 1;
  const char name = text[1];
  if (const auto value = short_unescape(name)) {
    out += *value;
    return 2;
  }
  switch (name) {
    case '\n':
      return 2;
    case '\'':
      out += '\'';
      return 2;
    case 'a':
      out += '\a';
      return 2;
    case 'v':
      out += '\v';
      return 2;
    case 'N': {
      const size_t end = text.starts_with("\\N{") ? text.find('}') : std::string_view::npos;
      return end == std::string_view::npos ? std::min<size_t>(text.size(), 2) : end + 1;
    }
    case 'x':
    case 'u':
    case 'U': {
      const size_t wanted = name == 'x' ? 2 : name == 'u' ? 4 : 8;
      const Hex hex = read_digits(text.substr(2), wanted, 4);
      if (hex.digits == wanted && hex.value < 0x110000) append_code(hex.value, out);
      return 2 + hex.digits;
    }
    default:
      break;
  }
  if (const Hex octal = read_digits(text.substr(1), 3, 3); octal.digits > 0) {
    append_code(octal.value, out);
    return 1 + octal.digits;
  }
  out += '\\';
  return 1;
}

}  // namespace

void append_json_escaped(std::string_view text, std::string& out) {
  for (size_t i = 0; i < text.size();) {
    const char c = text[i];
    if (c >= 0x20 && c <= 0x7E && c != '"' && c != '\\') {
      out += c;
      ++i;
      continue;
    }
    if (const char name = short_escape(c)) {
      out += {'\\', name};
      ++i;
      continue;
    }
    const size_t length = character_length(text.substr(i));
    const uint32_t code = length == 0 ? 0xFFFD : decode_character(text.substr(i, length));
    if (code < 0x10000) {
      append_unit(code, out);
    } else {
      append_unit(0xD800 + ((code - 0x10000) >> 10), out);
      append_unit(0xDC00 + ((code - 0x10000) & 0x3FF), out);
    }
    i += std::max<size_t>(length, 1);
  }
}

std::string json_unescaped(std::string_view escaped) {
  if (auto strict = read_strict(escaped)) return *std::move(strict);
  std::string out;
  for (size_t i = 0; i < escaped.size();) {
    if (escaped[i] == '\\') {
      i += read_python_escape(escaped.substr(i), out);
    } else {
      append_utf8(static_cast<uint8_t>(escaped[i++]), out);
    }
  }
  return out;
}

std::string JsonUnescaper::push(std::string_view piece) {
  pending_ += piece;
  return settle(false);
}

std::string JsonUnescaper::finish() { return settle(true); }

std::string JsonUnescaper::settle(bool ended) {
  std::string out;
  size_t i = 0;
  while (i < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(i);
    if (rest[0] != '\\') {
      out += rest[0];
      ++i;
      continue;
    }
    if (!ended && may_grow(rest)) break;
    const auto value = rest.size() < 2 ? std::nullopt : rest[1] == '/' ? std::optional('/') : short_unescape(rest[1]);
    if (value) {
      out += *value;
      i += 2;
    } else if (is_unit(rest)) {
      const Hex unit = read_unit(rest);
      append_code(unit.value, out);
      i += unit.digits;
    } else {
      out += '\\';
      ++i;
    }
  }
  pending_.erase(0, i);
  return out;
}

}  // namespace fox::data
