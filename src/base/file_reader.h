#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

namespace fox {

/// A file that is read in pieces.
class FileReader {
 public:
  /// Throws Error naming the file when it cannot be read.
  explicit FileReader(std::filesystem::path path);
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  int64_t size() const { return size_; }
  /// Bytes [first, first + count). Throws Error when the file has ended before, as one that is cut short meanwhile has.
  void read(int64_t first, int64_t count, void* out) const;

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  int64_t size_ = 0;
};

}  // namespace fox
