#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace fox {

/// Reads a whole file; throws Error naming it.
std::string read_file(const std::filesystem::path& path);

/// Writes a file so that a reader finds either the old content or the new: beside it, fsync, rename, fsync of the
/// folder. Throws Error naming the file and the reason (disk full, read-only, …); the old file then still stands.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);
/// The same for content that is produced piece by piece: `write` gets a function that appends bytes.
void write_file_atomically(const std::filesystem::path& path,
                           const std::function<void(const std::function<void(const void*, size_t)>& append)>& write);

/// Removes what `keep` does not say yes to, by its name, from a folder; folders with all that is in them.
void remove_others(const std::filesystem::path& dir, const std::function<bool(const std::string& name)>& keep);

/// fsync of a file or folder.
void sync_path(const std::filesystem::path& path);

/// XXH3-128 of a file, 32 hexadecimal digits.
std::string file_checksum(const std::filesystem::path& path);
/// XXH3-128 of bytes.
std::string bytes_checksum(std::string_view bytes);

/// XXH3-128 of bytes that come in pieces.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;
  void update(const void* data, size_t size);
  /// Of all bytes so far, 32 hexadecimal digits.
  std::string digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// One writer a directory: holds an advisory lock on dir/.lock until destroyed. Throws Error when another process has
/// it.
class DirectoryLock {
 public:
  explicit DirectoryLock(const std::filesystem::path& dir);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace fox
