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
#include "data/blosc_chunk.h"

namespace fox::data {

namespace fs = std::filesystem;

namespace {

/// Of the arrays that we write: what a reader of a few thousand tokens must decode. Blosc multiplies it by the size of
/// an element and takes 64 KiB at least.
constexpr int kBloscBlockBytes = 1 << 14;
constexpr const char* kChecksumLines = ".checksums";
constexpr const char* kChecksums = "chunk_xxh3_128";
constexpr size_t kChecksumSize = 32;  // characters
constexpr const char* kDamaged = "make the store, or fetch the file, again";

/// The checksums in .zattrs, one after another. They are taken as they are parsed: a tree of them would be large.
std::string read_checksums(const fs::path& attributes) {
  using nlohmann::json;
  std::string sums, member, name;
  if (!fs::exists(attributes)) return sums;
  const auto take = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::key) (depth == 1 ? member : name) = value.get<std::string>();
    if (event != json::parse_event_t::value || depth != 2 || member != kChecksums) return true;
    const auto* sum = value.get_ptr<const std::string*>();
    if (sum == nullptr || sum->size() != kChecksumSize || name != std::to_string(sums.size() / kChecksumSize)) {
      throw Error(fmt::format("{}: '{}' must be the chunks' checksums in order, but '{}' is {}", attributes.string(),
                              kChecksums, name, value.dump(-1, ' ', false, json::error_handler_t::replace)),
                  kDamaged);
    }
    sums += *sum;
    return false;
  };
  if (!json::parse(read_file(attributes), take, false).is_object())
    throw Error(attributes.string() + " is no JSON object", kDamaged);
  return sums;
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
  checked_.resize(checksums_.size() / kChecksumSize);
  most_recent_ = static_cast<size_t>(std::max<int64_t>(1, recent_bytes / meta_.chunk_bytes()));
}

fs::path ZarrArray::chunk_file(const std::string& name) const {
  fs::path file = dir_ / name;
  if (fs::exists(file)) return file;
  throw Error(fmt::format("{} is missing", file.string()), "the store is not complete: " + std::string(kDamaged));
}

void ZarrArray::check(int64_t number, std::string_view stored) const {
  const auto at = static_cast<size_t>(number);
  if (at >= checked_.size()) return;
  const std::string_view sum = std::string_view(checksums_).substr(at * kChecksumSize, kChecksumSize);
  if (bytes_checksum(stored) == sum) return;
  throw Error(fmt::format("{} ({} bytes) is damaged: its checksum is not {}", (dir_ / std::to_string(number)).string(),
                          stored.size(), sum),
              kDamaged);
}

void ZarrArray::read_part(int64_t number, int64_t first, int64_t count, char* out) const {
  const fs::path file = chunk_file(std::to_string(number));
  const auto at = static_cast<size_t>(number);
  const auto is_checked = [&] {
    const std::lock_guard lock(mutex_);
    return at >= checked_.size() || checked_[at];
  };
  // A sum needs the whole chunk, so it is taken once.
  if (!is_checked()) {
    check(number, read_file(file));
    const std::lock_guard lock(mutex_);
    checked_[at] = true;
  }
  read_items(file, meta_.chunk_bytes(), meta_.item_bytes(), first, count, out);
}

ZarrArray::Chunk ZarrArray::load(std::span<const int64_t> index, const std::string& name) const {
  const fs::path file = chunk_file(name);
  std::string bytes = read_file(file);
  if (index.size() == 1) check(index[0], bytes);
  if (meta_.blosc) {
    bytes = decode_chunk(bytes, meta_.chunk_bytes(), file);
  } else if (static_cast<int64_t>(bytes.size()) != meta_.chunk_bytes()) {
    throw Error(fmt::format("{} has {} bytes, but a chunk has {}", file.string(), bytes.size(), meta_.chunk_bytes()),
                kDamaged);
  }
  return std::make_shared<const std::string>(std::move(bytes));
}

std::string ZarrArray::name_of(std::span<const int64_t> index) const {
  std::string name;
  for (const int64_t i : index) name += (name.empty() ? "" : std::string(1, meta_.separator)) + std::to_string(i);
  return name;
}

ZarrArray::Chunk ZarrArray::chunk(std::span<const int64_t> index) const {
  const std::string name = name_of(index);
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
  Chunk loaded = load(index, name);
  const std::lock_guard lock(mutex_);
  recent_.emplace_front(name, loaded);
  if (recent_.size() > most_recent_) recent_.pop_back();
  return loaded;
}

std::optional<ZarrArray::Chunks> ZarrArray::chunks_of(std::span<const int64_t> start,
                                                      std::span<const int64_t> count) const {
  const size_t n = meta_.shape.size();
  if (start.size() != n || count.size() != n) throw std::out_of_range("a box of another number of dimensions");
  for (size_t d = 0; d < n; ++d) {
    if (start[d] < 0 || count[d] < 0 || start[d] > meta_.shape[d] - count[d])
      throw std::out_of_range("a box outside the array");
    if (count[d] == 0) return std::nullopt;
  }
  Chunks chunks{Index(n), Index(n)};
  for (size_t d = 0; d < n; ++d) {
    chunks.first[d] = start[d] / meta_.chunks[d];
    chunks.past[d] = (start[d] + count[d] - 1) / meta_.chunks[d] + 1;
  }
  return chunks;
}

void ZarrArray::read(std::span<const int64_t> start, std::span<const int64_t> count, void* out) const {
  const std::optional<Chunks> chunks = chunks_of(start, count);
  if (!chunks) return;
  Index index = chunks->first;
  do {
    copy_part(index, start, count, static_cast<char*>(out));
  } while (advance(index, chunks->first, chunks->past, index.size()));
}

void ZarrArray::check_complete(std::span<const int64_t> start, std::span<const int64_t> count) const {
  const std::optional<Chunks> chunks = chunks_of(start, count);
  if (!chunks) return;
  Index index = chunks->first;
  do {
    chunk_file(name_of(index));
  } while (advance(index, chunks->first, chunks->past, index.size()));
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
    return read_part(index[0], from[0] - index[0] * meta_.chunks[0], past[0] - from[0],
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
  meta_.blosc = ZarrMeta::Blosc{.blocksize = kBloscBlockBytes};
  pending_.reserve(static_cast<size_t>(meta_.chunk_bytes()));
  fs::create_directories(dir_);
}

bool ZarrWriter::resume(int64_t size, std::string pending) {
  const int64_t chunks = size / meta_.chunks[0];
  if (std::ssize(pending) != size % meta_.chunks[0] * meta_.item_bytes()) return false;
  const fs::path lines = dir_ / kChecksumLines;
  const auto lines_size = static_cast<uintmax_t>(chunks) * (kChecksumSize + 1);
  if (chunks > 0 && (!fs::exists(lines) || fs::file_size(lines) < lines_size)) return false;
  for (int64_t i = 0; i < chunks; ++i) {
    if (!fs::exists(dir_ / std::to_string(i))) return false;
  }
  if (fs::exists(lines)) fs::resize_file(lines, lines_size);
  remove_others(dir_, [chunks](const std::string& name) {
    const bool is_chunk = name.find_first_not_of("0123456789") == std::string::npos && name.size() < 18;
    return name == kChecksumLines || (is_chunk && std::stoll(name) < chunks);
  });
  chunks_written_ = chunks;
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
  write_file_atomically(dir_ / std::to_string(chunks_written_++), stored);
  std::ofstream lines(dir_ / kChecksumLines, std::ios::app);
  lines << bytes_checksum(stored) << '\n';
  if (!lines.flush())
    throw Error(fmt::format("cannot write {}", (dir_ / kChecksumLines).string()), "is the disk full?");
  pending_.clear();
}

void ZarrWriter::sync() const {
  // The chunks themselves are synced one by one.
  if (chunks_written_ > 0) sync_path(dir_ / kChecksumLines);
}

void ZarrWriter::finish() {
  if (!pending_.empty()) write_chunk();
  write_file_atomically(dir_ / ".zattrs", [&](const auto& append) {
    const auto put = [&](const std::string& text) { append(text.data(), text.size()); };
    put(fmt::format("{{\n \"{}\": {{", kChecksums));
    std::ifstream lines(dir_ / kChecksumLines);
    int64_t number = 0;
    for (std::string sum; std::getline(lines, sum); ++number)
      put(fmt::format("{}\n  \"{}\": \"{}\"", number == 0 ? "" : ",", number, sum));
    put("\n }\n}\n");
  });
  write_file_atomically(dir_ / ".zarray", meta_.to_json());
  fs::remove(dir_ / kChecksumLines);
}

}  // namespace fox::data
