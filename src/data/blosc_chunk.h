#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace fox::data {

// A chunk of a zarr array as Blosc stores it: a header, the places of its blocks, and the blocks, each compressed alone
// (README_CHUNK_FORMAT of c-blosc 1). `file` is where it lies, `chunk_bytes` what it holds. Thread-safe.

/// All elements of the chunk that `stored` is. Throws Error naming the file when it is no whole one.
std::string decode_chunk(std::string_view stored, int64_t chunk_bytes, const std::filesystem::path& file);

/// Elements [first, first + count) of `item_bytes` each: of the file, only the blocks that hold them are read. Throws
/// Error naming the file when it is missing, or no such chunk.
void read_items(const std::filesystem::path& file, int64_t chunk_bytes, int64_t item_bytes, int64_t first,
                int64_t count, void* out);

}  // namespace fox::data
