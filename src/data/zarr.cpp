#include "data/zarr.h"

#include <blosc.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/error.h"
#include "base/files.h"

namespace fox::data {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kRecentBytes = 64 << 20;
constexpr const char* kChecksums = "chunk_xxh3_128";
constexpr const char* kDamaged = "make the store, or fetch the file, again";

std::map<std::string, std::string> read_checksums(const fs::path& attributes) {
  std::map<std::string, std::string> checksums;
  if (!fs::exists(attributes)) return checksums;
  const auto root = nlohmann::json::parse(read_file(attributes), nullptr, false);
  if (!root.is_object()) throw Error(attributes.string() + " is no JSON object", kDamaged);
  const auto it = root.find(kChecksums);
  if (it == root.end()) return checksums;
  for (const auto& [name, value] : it->items()) {
    if (!value.is_string())
      throw Error(fmt::format("{}: '{}.{}' must be a string", attributes.string(), kChecksums, name), kDamaged);
    checksums.emplace(name, value.get<std::string>());
  }
  return checksums;
}

std::string decompress(const std::string& stored, int64_t expected, const fs::path& file) {
  size_t size = 0;
  // Reads the header only, and checks that it agrees with the length of the file.
  if (blosc_cbuffer_validate(stored.data(), stored.size(), &size) != 0) {
    throw Error(fmt::format("{} ({} bytes) is no whole Blosc buffer", file.string(), stored.size()), kDamaged);
  }
  if (static_cast<int64_t>(size) != expected) {
    throw Error(fmt::format("{} holds {} bytes of elements, but a chunk has {}", file.string(), size, expected),
                kDamaged);
  }
  std::string bytes(size, '\0');
  if (blosc_decompress_ctx(stored.data(), bytes.data(), bytes.size(), 1) != expected) {
    throw Error(fmt::format("{} cannot be decompressed", file.string()), kDamaged);
  }
  return bytes;
}

/// Steps to the next index of the box [first, past) in its first `dimensions`, the last of them fastest; false at the
/// end.
bool advance(std::vector<int64_t>& index, const std::vector<int64_t>& first, const std::vector<int64_t>& past,
             size_t dimensions) {
  for (size_t d = dimensions; d-- > 0;) {
    if (++index[d] < past[d]) return true;
    index[d] = first[d];
  }
  return false;
}

}  // namespace

ZarrArray::ZarrArray(fs::path dir, const std::string& dtype) : dir_(std::move(dir)) {
  const fs::path file = dir_ / ".zarray";
  if (!fs::exists(file))
    throw Error(fmt::format("{} is no zarr array: it has no .zarray", dir_.string()), "name the array's folder");
  meta_ = ZarrMeta::parse(read_file(file), file.string());
  if (meta_.dtype != dtype) {
    throw Error(fmt::format("{}: 'dtype' must be \"{}\", not \"{}\"", file.string(), dtype, meta_.dtype), kDamaged);
  }
  checksums_ = read_checksums(dir_ / ".zattrs");
  most_recent_ = static_cast<size_t>(std::max<int64_t>(1, kRecentBytes / meta_.chunk_bytes()));
}

ZarrArray::Chunk ZarrArray::load(const std::string& name) const {
  const fs::path file = dir_ / name;
  if (!fs::exists(file))
    throw Error(fmt::format("{} is missing", file.string()), "the store is not complete: " + std::string(kDamaged));
  std::string bytes = read_file(file);
  if (const auto it = checksums_.find(name); it != checksums_.end() && bytes_checksum(bytes) != it->second) {
    throw Error(
        fmt::format("{} ({} bytes) is damaged: its checksum is not {}", file.string(), bytes.size(), it->second),
        kDamaged);
  }
  if (meta_.blosc) {
    bytes = decompress(bytes, meta_.chunk_bytes(), file);
  } else if (static_cast<int64_t>(bytes.size()) != meta_.chunk_bytes()) {
    throw Error(fmt::format("{} has {} bytes, but a chunk has {}", file.string(), bytes.size(), meta_.chunk_bytes()),
                kDamaged);
  }
  return std::make_shared<const std::string>(std::move(bytes));
}

ZarrArray::Chunk ZarrArray::chunk(std::span<const int64_t> index) const {
  std::string name;
  for (const int64_t i : index) name += (name.empty() ? "" : std::string(1, meta_.separator)) + std::to_string(i);
  {
    const std::lock_guard lock(mutex_);
    const auto it =
        std::find_if(recent_.begin(), recent_.end(), [&](const auto& entry) { return entry.first == name; });
    if (it != recent_.end()) {
      recent_.splice(recent_.begin(), recent_, it);
      return it->second;
    }
  }
  // Decoded outside of the lock: two threads may decode the same chunk, none waits for another's.
  Chunk loaded = load(name);
  const std::lock_guard lock(mutex_);
  recent_.emplace_front(name, loaded);
  if (recent_.size() > most_recent_) recent_.pop_back();
  return loaded;
}

void ZarrArray::read(std::span<const int64_t> start, std::span<const int64_t> count, void* out) const {
  const size_t n = meta_.shape.size();
  if (start.size() != n || count.size() != n) throw std::out_of_range("a box of another number of dimensions");
  for (size_t d = 0; d < n; ++d) {
    if (start[d] < 0 || count[d] < 0 || start[d] > meta_.shape[d] - count[d])
      throw std::out_of_range("a box outside the array");
    if (count[d] == 0) return;
  }
  Index first(n), past(n);  // the chunks that the box touches
  for (size_t d = 0; d < n; ++d) {
    first[d] = start[d] / meta_.chunks[d];
    past[d] = (start[d] + count[d] - 1) / meta_.chunks[d] + 1;
  }
  Index index = first;
  do {
    copy_part(index, start, count, static_cast<char*>(out));
  } while (advance(index, first, past, n));
}

void ZarrArray::copy_part(const Index& index, std::span<const int64_t> start, std::span<const int64_t> count,
                          char* out) const {
  const Chunk source = chunk(index);
  const size_t n = index.size();
  const int64_t item = meta_.item_bytes();
  Index from(n), past(n);  // the part of the box that lies in this chunk
  for (size_t d = 0; d < n; ++d) {
    from[d] = std::max(start[d], index[d] * meta_.chunks[d]);
    past[d] = std::min(start[d] + count[d], (index[d] + 1) * meta_.chunks[d]);
  }
  const auto row_bytes = static_cast<size_t>((past[n - 1] - from[n - 1]) * item);
  Index at = from;
  do {
    int64_t source_at = 0, out_at = 0;
    for (size_t d = 0; d < n; ++d) {
      source_at = source_at * meta_.chunks[d] + at[d] - index[d] * meta_.chunks[d];
      out_at = out_at * count[d] + at[d] - start[d];
    }
    std::memcpy(out + out_at * item, source->data() + source_at * item, row_bytes);
  } while (advance(at, from, past, n - 1));
}

ZarrWriter::ZarrWriter(fs::path dir, const std::string& dtype, int64_t chunk) : dir_(std::move(dir)) {
  meta_.shape = {0};
  meta_.chunks = {chunk};
  meta_.dtype = dtype;
  meta_.blosc = ZarrMeta::Blosc{};
  pending_.reserve(static_cast<size_t>(meta_.chunk_bytes()));
  fs::create_directories(dir_);
}

void ZarrWriter::append(const void* elements, int64_t count) {
  const char* bytes = static_cast<const char*>(elements);
  int64_t left = count * meta_.item_bytes();
  while (left > 0) {
    const int64_t take = std::min(left, meta_.chunk_bytes() - static_cast<int64_t>(pending_.size()));
    pending_.append(bytes, static_cast<size_t>(take));
    bytes += take;
    left -= take;
    if (static_cast<int64_t>(pending_.size()) == meta_.chunk_bytes()) write_chunk();
  }
  meta_.shape[0] += count;
}

void ZarrWriter::write_chunk() {
  pending_.resize(static_cast<size_t>(meta_.chunk_bytes()));  // the last one is padded with zeros
  std::string stored(pending_.size() + BLOSC_MAX_OVERHEAD, '\0');
  const ZarrMeta::Blosc& blosc = *meta_.blosc;
  const int size =
      blosc_compress_ctx(blosc.clevel, blosc.shuffle, static_cast<size_t>(meta_.item_bytes()), pending_.size(),
                         pending_.data(), stored.data(), stored.size(), blosc.cname.c_str(), 0, 1);
  if (size <= 0)
    throw Error(fmt::format("cannot compress a chunk of {}", dir_.string()), "is the machine out of memory?");
  stored.resize(static_cast<size_t>(size));
  write_file_atomically(dir_ / std::to_string(checksums_.size()), stored);
  checksums_.push_back(bytes_checksum(stored));
  pending_.clear();
}

void ZarrWriter::finish() {
  if (!pending_.empty()) write_chunk();
  nlohmann::ordered_json checksums = nlohmann::ordered_json::object();
  for (size_t i = 0; i < checksums_.size(); ++i) checksums[std::to_string(i)] = checksums_[i];
  write_file_atomically(dir_ / ".zattrs", nlohmann::ordered_json{{kChecksums, checksums}}.dump(1) + "\n");
  write_file_atomically(dir_ / ".zarray", meta_.to_json());
}

}  // namespace fox::data
