#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace fox::data {

/// The bytes of a file from its beginning to its end, decompressed when it is a Zstandard file (of one or more frames).
class ByteSource {
 public:
  /// Throws Error naming the file when it cannot be read.
  explicit ByteSource(const std::filesystem::path& file);
  ~ByteSource();
  ByteSource(ByteSource&&) noexcept;
  ByteSource& operator=(ByteSource&&) noexcept;

  /// Appends up to `size` bytes to `out`; false at the end of the file. Throws Error for damaged or truncated data.
  bool read(size_t size, std::string& out);
  /// Bytes of the file itself that were taken so far.
  int64_t stored() const;
  /// XXH3-128 of what was taken so far: of the whole file, once read() returned false.
  std::string checksum() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fox::data
