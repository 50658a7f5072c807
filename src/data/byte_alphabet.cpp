#include "data/byte_alphabet.h"

#include <array>

namespace fox::data {

namespace {

constexpr bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

struct Alphabet {
  std::array<uint8_t, 256> byte_of_rank{};
  std::array<uint16_t, 256> code_point{};
  std::array<int16_t, 0x144> byte{};  // by code point; the last one is U+0143

  constexpr Alphabet() {
    byte.fill(-1);
    int rank = 0;
    for (int b = 0; b < 256; ++b) {
      if (stands_for_itself(b)) add(rank++, b, b);
    }
    for (int b = 0, next = 0x100; b < 256; ++b) {
      if (!stands_for_itself(b)) add(rank++, b, next++);
    }
  }
  constexpr void add(int rank, int b, int code) {
    byte_of_rank[rank] = static_cast<uint8_t>(b);
    code_point[b] = static_cast<uint16_t>(code);
    byte[code] = static_cast<int16_t>(b);
  }
};

constexpr Alphabet kAlphabet;

}  // namespace

uint8_t byte_of_rank(int rank) { return kAlphabet.byte_of_rank.at(rank); }

std::string to_alphabet(std::string_view bytes) {
  std::string text;
  text.reserve(bytes.size() * 2);
  for (const char c : bytes) {
    const uint16_t code = kAlphabet.code_point[static_cast<uint8_t>(c)];
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else {
      text += static_cast<char>(0xC0 | (code >> 6));
      text += static_cast<char>(0x80 | (code & 0x3F));
    }
  }
  return text;
}

std::optional<std::string> from_alphabet(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    uint32_t code = static_cast<uint8_t>(text[i]);
    if (code >= 0x80) {
      // All of the alphabet beyond ASCII takes two bytes.
      if ((code & 0xE0) != 0xC0 || i + 1 == text.size() || (text[i + 1] & 0xC0) != 0x80) return std::nullopt;
      code = (code & 0x1F) << 6 | (static_cast<uint8_t>(text[++i]) & 0x3F);
    }
    if (code >= kAlphabet.byte.size() || kAlphabet.byte[code] < 0) return std::nullopt;
    bytes += static_cast<char>(kAlphabet.byte[code]);
  }
  return bytes;
}

}  // namespace fox::data
