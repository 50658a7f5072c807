#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>

namespace fox {

/// A file as memory that the system fills as it is read and may take back: only what is touched is read.
class MappedFile {
 public:
  /// Throws Error naming the file when it cannot be read.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return {static_cast<const char*>(data_), size_}; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace fox
