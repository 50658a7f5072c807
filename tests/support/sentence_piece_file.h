#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace fox::test {

/// A .model file of SentencePiece, written field by field.
class SentencePieceFile {
 public:
  static std::string varint(uint64_t value) {
    std::string bytes;
    for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
    return bytes + static_cast<char>(value);
  }
  static std::string field(int number, uint64_t value) {
    return varint(static_cast<uint64_t>(number) << 3) + varint(value);
  }
  static std::string field(int number, std::string_view bytes) {
    return varint(static_cast<uint64_t>(number) << 3 | 2) + varint(bytes.size()) + std::string(bytes);
  }
  static std::string piece(std::string_view text, float score = 0, int kind = 1) {
    const auto bits = std::bit_cast<uint32_t>(score);
    std::string little_endian(4, '\0');
    for (int i = 0; i < 4; ++i) little_endian[static_cast<size_t>(i)] = static_cast<char>(bits >> (8 * i));
    const std::string kind_field = kind == 1 ? "" : field(3, static_cast<uint64_t>(kind));
    return field(1, field(1, text) + varint(2 << 3 | 5) + little_endian + kind_field);
  }

  std::string pieces = piece("<unk>", 0, 2) + piece("<s>", 0, 3) + piece("</s>", 0, 3) + piece("\xE2\x96\x81", -3) +
                       piece("a", -2) +
                       piece(
                           "\xE2\x96\x81"
                           "a",
                           -1) +
                       piece("x", -2) + piece("\xE2\x96\x81x", -1);
  std::string trainer = field(3, 2);  // BPE
  std::string normalizer;             // white space as usual
  std::string more;
  std::string bytes() const { return pieces + field(2, trainer) + field(3, normalizer) + more; }
};

}  // namespace fox::test
