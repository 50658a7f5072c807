#include "data/blosc_chunk.h"

#include <blosc.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/file_reader.h"

namespace fox::data {

namespace fs = std::filesystem;

namespace {

constexpr const char* kFetchAgain = "make the store, or fetch the file, again";
constexpr int64_t kHeaderBytes = BLOSC_MIN_HEADER_LENGTH;

/// Throws when a file of `stored_bytes` that begins with this header is no whole chunk.
void check_header(const char* header, int64_t stored_bytes, int64_t chunk_bytes, const fs::path& file) {
  size_t size = 0;
  if (blosc_cbuffer_validate(header, static_cast<size_t>(stored_bytes), &size) != 0)
    throw Error(fmt::format("{} ({} bytes) is no whole Blosc buffer", file.string(), stored_bytes), kFetchAgain);
  if (static_cast<int64_t>(size) == chunk_bytes) return;
  throw Error(fmt::format("{} holds {} bytes of elements, but a chunk has {}", file.string(), size, chunk_bytes),
              kFetchAgain);
}

[[noreturn]] void fail_to_decompress(const fs::path& file) {
  throw Error(fmt::format("{} cannot be decompressed", file.string()), kFetchAgain);
}

/// A part of a chunk's file, each byte at its place; what was not asked for is not read and means nothing.
class PartOfFile {
 public:
  explicit PartOfFile(const fs::path& path) : file_(path), bytes_(memory_of_thread()) {
    if (std::ssize(bytes_) < size()) bytes_.resize(static_cast<size_t>(size()));
  }
  int64_t size() const { return file_.size(); }
  /// Reads bytes [first, past), which must lie in the file.
  void fetch(int64_t first, int64_t past) { file_.read(first, past - first, bytes_.data() + first); }
  const char* bytes() const { return bytes_.data(); }

 private:
  /// Kept: to fetch some megabytes of memory from the system and give them back costs more than to read.
  static std::string& memory_of_thread() {
    thread_local std::string memory;
    return memory;
  }

  FileReader file_;
  std::string& bytes_;
};

/// Reads the blocks of a compressed chunk that hold its bytes [first, past). Throws when they are nowhere.
void fetch_blocks(PartOfFile& part, int64_t chunk_bytes, int64_t first, int64_t past, const fs::path& file) {
  size_t bytes, stored_bytes, block_size;
  blosc_cbuffer_sizes(part.bytes(), &bytes, &stored_bytes, &block_size);
  const auto block_bytes = static_cast<int64_t>(block_size);
  if (block_bytes < 1 || block_bytes > chunk_bytes) fail_to_decompress(file);
  const int64_t blocks = (chunk_bytes + block_bytes - 1) / block_bytes;
  const int64_t table_end = kHeaderBytes + blocks * static_cast<int64_t>(sizeof(int32_t));
  if (table_end > part.size()) fail_to_decompress(file);
  part.fetch(kHeaderBytes, table_end);
  std::vector<int32_t> starts(static_cast<size_t>(blocks));
  std::memcpy(starts.data(), part.bytes() + kHeaderBytes, starts.size() * sizeof(int32_t));
  // A block ends where the next one in the file begins, which need not hold the next elements: threads write blocks as
  // they are done.
  std::vector<int32_t> in_file = starts;
  std::sort(in_file.begin(), in_file.end());
  for (int64_t block = first / block_bytes; block * block_bytes < past; ++block) {
    const int32_t start = starts[static_cast<size_t>(block)];
    if (start < table_end || start > part.size()) fail_to_decompress(file);
    const auto next = std::upper_bound(in_file.begin(), in_file.end(), start);
    part.fetch(start, next == in_file.end() ? part.size() : std::min<int64_t>(*next, part.size()));
  }
}

}  // namespace

std::string decode_chunk(std::string_view stored, int64_t chunk_bytes, const fs::path& file) {
  check_header(stored.data(), std::ssize(stored), chunk_bytes, file);
  std::string bytes(static_cast<size_t>(chunk_bytes), '\0');
  if (blosc_decompress_ctx(stored.data(), bytes.data(), bytes.size(), 1) != chunk_bytes) fail_to_decompress(file);
  return bytes;
}

void read_items(const fs::path& file, int64_t chunk_bytes, int64_t item_bytes, int64_t first, int64_t count,
                void* out) {
  PartOfFile part(file);
  part.fetch(0, std::min(kHeaderBytes, part.size()));
  check_header(part.bytes(), part.size(), chunk_bytes, file);
  size_t type_bytes;
  int flags;
  blosc_cbuffer_metainfo(part.bytes(), &type_bytes, &flags);
  const int64_t from = first * item_bytes, past = (first + count) * item_bytes;
  const auto type = static_cast<int64_t>(type_bytes);  // what the writer took for an element
  if (type == 0 || item_bytes % type != 0) fail_to_decompress(file);
  if ((flags & BLOSC_MEMCPYED) != 0) {
    if (kHeaderBytes + past > part.size()) fail_to_decompress(file);
    part.fetch(kHeaderBytes + from, kHeaderBytes + past);
  } else {
    fetch_blocks(part, chunk_bytes, from, past, file);
  }
  const auto item = static_cast<int>(from / type), items = static_cast<int>((past - from) / type);
  if (blosc_getitem(part.bytes(), item, items, out) != past - from) fail_to_decompress(file);
}

}  // namespace fox::data
