#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/files.h"
#include "base/progress.h"
#include "data/token_store.h"
#include "data/zarr.h"

namespace fox::data {

namespace fs = std::filesystem;
using nlohmann::json;

namespace {

constexpr int64_t kTokensPerChunk = 1 << 20;
constexpr int64_t kOffsetsPerChunk = 1 << 17;
/// Less text than this is done before a bar could be read.
constexpr int64_t kBytesWorthABar = 16 << 20;

/// A text file as memory that the kernel fills and may take back: a file of any size costs no memory of ours.
class MappedFile {
 public:
  explicit MappedFile(const fs::path& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info {};
    int error = fd < 0 || ::fstat(fd, &info) != 0 ? errno : 0;
    if (error == 0 && info.st_size > 0) {
      size_ = static_cast<size_t>(info.st_size);
      data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
      if (data_ == MAP_FAILED) error = errno;
    }
    if (fd >= 0) ::close(fd);
    if (error != 0)
      throw Error(fmt::format("cannot read {}: {}", path.string(), std::generic_category().message(error)),
                  "check the path");
    if (size_ > 0) ::madvise(data_, size_, MADV_SEQUENTIAL);
  }
  ~MappedFile() {
    if (size_ > 0) ::munmap(data_, size_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view text() const { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

std::vector<fs::path> text_files(const std::vector<fs::path>& sources) {
  std::vector<fs::path> files;
  for (const fs::path& source : sources) {
    if (!fs::exists(source))
      throw Error(fmt::format("{} does not exist", source.string()), "name text files, or folders of *.txt files");
    if (!fs::is_directory(source)) {
      files.push_back(source);
      continue;
    }
    std::vector<fs::path> found;
    for (const auto& entry :
         fs::recursive_directory_iterator(source, fs::directory_options::follow_directory_symlink)) {
      if (entry.is_regular_file() && entry.path().extension() == ".txt") found.push_back(entry.path());
    }
    if (found.empty())
      throw Error(fmt::format("{} holds no *.txt file", source.string()), "name text files, or folders of *.txt files");
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  if (files.empty()) throw Error("no text to read", "name text files, or folders of *.txt files");
  return files;
}

/// What tells whether a file is still the one that a store was made of.
json identity(const fs::path& file) {
  const auto time = fs::last_write_time(file).time_since_epoch();
  return {{"path", fs::absolute(file).lexically_normal().string()},
          {"size", fs::file_size(file)},
          {"time", std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()}};
}

/// True when the store at `dir` was made of these files. Equal path, size and time are believed; else the contents
/// decide, so a copied or moved corpus is not read again.
bool is_store_of(const fs::path& dir, const std::vector<fs::path>& files, const json& identities,
                 const Tokenizer& tokenizer) {
  if (!fs::exists(dir / ".zattrs")) return false;
  const json stored = json::parse(read_file(dir / ".zattrs"), nullptr, false);
  if (!stored.is_object() || stored.value("tokenizer", json()) != tokenizer.fingerprint()) return false;
  const json sources = stored.value("sources", json());
  if (!sources.is_array() || sources.size() != files.size()) return false;
  for (size_t i = 0; i < files.size(); ++i) {
    json known = sources[i];
    if (!known.is_object() || known.value("size", json()) != identities[i]["size"]) return false;
    const json checksum = known.value("checksum", json());
    known.erase("checksum");
    if (known != identities[i] && checksum != file_checksum(files[i])) return false;
  }
  return true;
}

/// Writes the tokens of one text after another, as u2 or u4.
class Writer {
 public:
  Writer(const fs::path& dir, const Tokenizer& tokenizer)
      : tokenizer_(tokenizer),
        wide_(tokenizer.vocab_size() > 65536),
        tokens_(dir / "tokens", wide_ ? "<u4" : "<u2", kTokensPerChunk),
        offsets_(dir / "doc_offsets", "<i8", kOffsetsPerChunk) {}

  void add_document(std::string_view text, const std::function<void(int64_t bytes)>& advanced) {
    put_offset();
    const int32_t start = tokenizer_.end_of_text();
    put(std::span(&start, 1));
    tokenizer_.encode(text, [&](std::span<const int32_t> ids) {
      put(ids);
      int64_t bytes = 0;
      for (const int32_t id : ids) bytes += std::ssize(tokenizer_.bytes_of(id));
      advanced(bytes);
    });
  }
  void finish() {
    put_offset();
    tokens_.finish();
    offsets_.finish();
  }

 private:
  void put(std::span<const int32_t> ids) {
    if (wide_) return tokens_.append(ids.data(), std::ssize(ids));
    narrow_.assign(ids.begin(), ids.end());
    tokens_.append(narrow_.data(), std::ssize(narrow_));
  }
  void put_offset() {
    const int64_t offset = tokens_.size();
    offsets_.append(&offset, 1);
  }

  const Tokenizer& tokenizer_;
  bool wide_;
  ZarrWriter tokens_, offsets_;
  std::vector<uint16_t> narrow_;
};

void write_store(const fs::path& dir, const std::vector<fs::path>& files, json identities, const Tokenizer& tokenizer) {
  int64_t total = 0, done = 0;
  for (const json& file : identities) total += file["size"].get<int64_t>();
  std::optional<Progress> progress;
  if (total >= kBytesWorthABar) progress.emplace("tokenize", total, "bytes");
  Writer writer(dir, tokenizer);
  for (size_t i = 0; i < files.size(); ++i) {
    const MappedFile file(files[i]);
    writer.add_document(file.text(), [&](int64_t bytes) {
      done += bytes;
      if (progress) progress->update(done, files[i].filename().string());
    });
    identities[i]["checksum"] = bytes_checksum(file.text());
  }
  writer.finish();
  const json attributes = {{"tokenizer", tokenizer.fingerprint()},
                           {"vocab_size", tokenizer.vocab_size()},
                           {"end_of_text", tokenizer.end_of_text()},
                           {"sources", std::move(identities)}};
  write_file_atomically(dir / ".zattrs", attributes.dump(1, ' ', false, json::error_handler_t::replace) + "\n");
  write_file_atomically(dir / ".zgroup", "{\n  \"zarr_format\": 2\n}\n");
}

/// A folder beside `dir` whose name says what it is for.
fs::path beside(const fs::path& dir, const char* purpose) {
  return dir.parent_path() / fmt::format(".{}.{}", dir.filename().string(), purpose);
}

/// Puts the finished `built` in the place of `dir`. A crash in between leaves no store, never a mixed one.
void replace(const fs::path& built, const fs::path& dir) {
  const fs::path old = beside(dir, "old");
  fs::remove_all(old);
  if (fs::exists(dir)) fs::rename(dir, old);
  fs::rename(built, dir);
  sync_path(dir.parent_path());
  fs::remove_all(old);
}

}  // namespace

TokenStore build_token_store(const std::vector<fs::path>& sources, const Tokenizer& tokenizer, const fs::path& where) {
  const fs::path dir = fs::absolute(where).lexically_normal();
  const std::vector<fs::path> files = text_files(sources);
  json identities = json::array();
  for (const fs::path& file : files) identities.push_back(identity(file));
  if (is_store_of(dir, files, identities, tokenizer)) return TokenStore::open(dir);
  if (fs::exists(dir) && !fs::exists(dir / ".zgroup") && !(fs::is_directory(dir) && fs::is_empty(dir))) {
    throw Error(fmt::format("{} exists and is no token store", dir.string()),
                "name a folder of its own for the tokens");
  }
  try {
    const fs::path building = beside(dir, "building");
    fs::create_directories(building);
    {
      const DirectoryLock lock(building);
      // What a build that was killed left behind.
      for (const char* name : {"tokens", "doc_offsets", ".zattrs", ".zgroup"}) fs::remove_all(building / name);
      write_store(building, files, std::move(identities), tokenizer);
      fs::remove(building / ".lock");
      replace(building, dir);
    }
  } catch (const fs::filesystem_error& error) {
    throw Error(fmt::format("cannot write the token store {}: {}", dir.string(), error.code().message()),
                "check the folder and its disk");
  }
  return TokenStore::open(dir);
}

}  // namespace fox::data
