#pragma once

#include <blosc.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace fox::test {

/// A store in LongCrawl64's layout, written with Blosc and nothing of ours: a zarr v2 array of u2 at the root, chunks
/// in files "row.column" with lz4 and shuffle, stored whole at the edges. Padding is 65535, which no vocabulary has:
/// who reads it is found out.
class LongCrawl64Store {
 public:
  LongCrawl64Store(const std::filesystem::path& dir, int64_t documents, int64_t tokens, int64_t chunk)
      : documents_(documents), tokens_(tokens) {
    std::filesystem::create_directories(dir);
    for (int64_t row = 0; row * chunk < documents; ++row) {
      for (int64_t column = 0; column * chunk < tokens; ++column) write_chunk(dir, row, column, chunk);
    }
    std::ofstream(dir / ".zarray")
        << R"({"chunks": [)" << chunk << ", " << chunk
        << R"(], "compressor": {"blocksize": 0, "clevel": 5, "cname": "lz4", "id": "blosc",)"
        << R"( "shuffle": 1}, "dtype": "<u2", "fill_value": 0, "filters": null, "order": "C",)"
        << R"( "shape": [)" << documents << ", " << tokens << R"(], "zarr_format": 2})";
  }

  /// What stands there.
  int64_t token(int64_t document, int64_t position) const {
    uint64_t x = static_cast<uint64_t>(document * tokens_ + position) * 0x9E3779B97F4A7C15u;
    return static_cast<int64_t>((x ^ x >> 31) % 50256);
  }

 private:
  void write_chunk(const std::filesystem::path& dir, int64_t row, int64_t column, int64_t chunk) const {
    std::vector<uint16_t> elements(static_cast<size_t>(chunk * chunk), 65535);
    for (int64_t i = 0; i < chunk && row * chunk + i < documents_; ++i) {
      for (int64_t j = 0; j < chunk && column * chunk + j < tokens_; ++j) {
        elements[i * chunk + j] = static_cast<uint16_t>(token(row * chunk + i, column * chunk + j));
      }
    }
    const size_t bytes = elements.size() * sizeof(uint16_t);
    std::string stored(bytes + BLOSC_MAX_OVERHEAD, '\0');
    stored.resize(blosc_compress_ctx(5, BLOSC_SHUFFLE, sizeof(uint16_t), bytes, elements.data(), stored.data(),
                                     stored.size(), "lz4", 0, 1));
    std::ofstream(dir / (std::to_string(row) + "." + std::to_string(column)), std::ios::binary) << stored;
  }

  int64_t documents_, tokens_;
};

}  // namespace fox::test
