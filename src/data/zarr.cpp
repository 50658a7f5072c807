#include "data/zarr.h"

#include <blosc.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "base/error.h"
#include "base/files.h"
#include "base/mapped_file.h"

namespace fox::data {

namespace fs = std::filesystem;

namespace {

/// Of the arrays that we write: what a reader of a few thousand tokens must decode.
constexpr int kBlockBytes = 1 << 16;
constexpr const char* kChecksumLines = ".checksums";
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

/// Throws when `stored` is no whole Blosc buffer of `expected` bytes.
void check_buffer(std::string_view stored, int64_t expected, const fs::path& file) {
  size_t size = 0;
  // Reads the header only, and checks that it agrees with the length of the file.
  if (blosc_cbuffer_validate(stored.data(), stored.size(), &size) != 0) {
    throw Error(fmt::format("{} ({} bytes) is no whole Blosc buffer", file.string(), stored.size()), kDamaged);
  }
  if (static_cast<int64_t>(size) != expected) {
    throw Error(fmt::format("{} holds {} bytes of elements, but a chunk has {}", file.string(), size, expected),
                kDamaged);
  }
}

std::string decompress(std::string_view stored, int64_t expected, const fs::path& file) {
  check_buffer(stored, expected, file);
  std::string bytes(static_cast<size_t>(expected), '\0');
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

ZarrMeta ZarrMeta::read(const fs::path& dir) {
  const fs::path file = dir / ".zarray";
  if (!fs::exists(file))
    throw Error(fmt::format("{} is no zarr array: it has no .zarray", dir.string()), "name the array's folder");
  return parse(read_file(file), file.string());
}

ZarrArray::ZarrArray(fs::path dir, const std::string& dtype, int64_t recent_bytes)
    : dir_(std::move(dir)), meta_(ZarrMeta::read(dir_)) {
  if (meta_.dtype != dtype) {
    const std::string file = (dir_ / ".zarray").string();
    throw Error(fmt::format("{}: 'dtype' must be \"{}\", not \"{}\"", file, dtype, meta_.dtype), kDamaged);
  }
  checksums_ = read_checksums(dir_ / ".zattrs");
  most_recent_ = static_cast<size_t>(std::max<int64_t>(1, recent_bytes / meta_.chunk_bytes()));
}

fs::path ZarrArray::chunk_file(const std::string& name) const {
  fs::path file = dir_ / name;
  if (fs::exists(file)) return file;
  throw Error(fmt::format("{} is missing", file.string()), "the store is not complete: " + std::string(kDamaged));
}

void ZarrArray::check(const std::string& name, std::string_view stored) const {
  const auto it = checksums_.find(name);
  if (it == checksums_.end() || bytes_checksum(stored) == it->second) return;
  throw Error(fmt::format("{} ({} bytes) is damaged: its checksum is not {}", (dir_ / name).string(), stored.size(),
                          it->second),
              kDamaged);
}

void ZarrArray::read_items(int64_t index, int64_t first, int64_t count, char* out) const {
  const std::string name = std::to_string(index);
  const MappedFile file(chunk_file(name));
  const std::string_view stored = file.bytes();
  bool checked;
  {
    const std::lock_guard lock(mutex_);
    checked = checked_.contains(index);
  }
  // A sum needs the whole chunk, so it is taken once.
  if (!checked) {
    check(name, stored);
    const std::lock_guard lock(mutex_);
    checked_.insert(index);
  }
  check_buffer(stored, meta_.chunk_bytes(), dir_ / name);
  const int64_t bytes = count * meta_.item_bytes();
  if (blosc_getitem(stored.data(), static_cast<int>(first), static_cast<int>(count), out) != bytes)
    throw Error(fmt::format("{} cannot be decompressed", (dir_ / name).string()), kDamaged);
}

ZarrArray::Chunk ZarrArray::load(const std::string& name) const {
  const fs::path file = chunk_file(name);
  std::string bytes = read_file(file);
  check(name, bytes);
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
  const size_t n = index.size();
  const int64_t item = meta_.item_bytes();
  Index from(n), past(n);  // the part of the box that lies in this chunk
  for (size_t d = 0; d < n; ++d) {
    from[d] = std::max(start[d], index[d] * meta_.chunks[d]);
    past[d] = std::min(start[d] + count[d], (index[d] + 1) * meta_.chunks[d]);
  }
  if (n == 1 && meta_.blosc && past[0] - from[0] <= meta_.chunks[0] / 4) {
    return read_items(index[0], from[0] - index[0] * meta_.chunks[0], past[0] - from[0],
                      out + (from[0] - start[0]) * item);
  }
  const Chunk source = chunk(index);
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
  meta_.blosc = ZarrMeta::Blosc{.blocksize = kBlockBytes};
  pending_.reserve(static_cast<size_t>(meta_.chunk_bytes()));
  fs::create_directories(dir_);
}

bool ZarrWriter::resume(int64_t size, std::string pending) {
  const int64_t chunks = size / meta_.chunks[0];
  if (std::ssize(pending) != size % meta_.chunks[0] * meta_.item_bytes()) return false;
  std::ifstream lines(dir_ / kChecksumLines);
  checksums_.clear();
  for (std::string line; std::ssize(checksums_) < chunks && std::getline(lines, line);) {
    if (!fs::exists(dir_ / std::to_string(checksums_.size()))) return false;
    checksums_.push_back(std::move(line));
  }
  if (std::ssize(checksums_) < chunks) return false;
  std::string kept;
  for (const std::string& line : checksums_) kept += line + "\n";
  write_file_atomically(dir_ / kChecksumLines, kept);
  std::vector<fs::path> later;
  for (const auto& entry : fs::directory_iterator(dir_)) {
    const std::string name = entry.path().filename().string();
    const bool is_chunk = name.find_first_not_of("0123456789") == std::string::npos && name.size() < 18;
    if (name != kChecksumLines && !(is_chunk && std::stoll(name) < chunks)) later.push_back(entry.path());
  }
  for (const fs::path& file : later) fs::remove(file);
  pending_ = std::move(pending);
  pending_.reserve(static_cast<size_t>(meta_.chunk_bytes()));
  meta_.shape[0] = size;
  return true;
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

std::string compress_chunk(const ZarrMeta& meta, const void* elements) {
  const auto bytes = static_cast<size_t>(meta.chunk_bytes());
  std::string stored(bytes + BLOSC_MAX_OVERHEAD, '\0');
  const ZarrMeta::Blosc& blosc = *meta.blosc;
  const int size =
      blosc_compress_ctx(blosc.clevel, blosc.shuffle, static_cast<size_t>(meta.item_bytes()), bytes, elements,
                         stored.data(), stored.size(), blosc.cname.c_str(), static_cast<size_t>(blosc.blocksize), 1);
  if (size <= 0)
    throw Error(fmt::format("cannot compress a chunk of {} bytes", bytes), "is the machine out of memory?");
  stored.resize(static_cast<size_t>(size));
  return stored;
}

void ZarrWriter::write_chunk() {
  pending_.resize(static_cast<size_t>(meta_.chunk_bytes()));  // the last one is padded with zeros
  const std::string stored = compress_chunk(meta_, pending_.data());
  write_file_atomically(dir_ / std::to_string(checksums_.size()), stored);
  checksums_.push_back(bytes_checksum(stored));
  std::ofstream(dir_ / kChecksumLines, std::ios::app) << checksums_.back() << '\n';
  pending_.clear();
}

void ZarrWriter::sync() const {
  // The chunks themselves are synced one by one.
  if (!checksums_.empty()) sync_path(dir_ / kChecksumLines);
}

void ZarrWriter::finish() {
  if (!pending_.empty()) write_chunk();
  nlohmann::ordered_json checksums = nlohmann::ordered_json::object();
  for (size_t i = 0; i < checksums_.size(); ++i) checksums[std::to_string(i)] = checksums_[i];
  write_file_atomically(dir_ / ".zattrs", nlohmann::ordered_json{{kChecksums, checksums}}.dump(1) + "\n");
  write_file_atomically(dir_ / ".zarray", meta_.to_json());
  fs::remove(dir_ / kChecksumLines);
}

}  // namespace fox::data
