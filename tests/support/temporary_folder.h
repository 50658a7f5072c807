#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <string>

namespace fox::test {

/// A folder of its own for a test, deleted with all it holds at the end of the scope.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    // In memory where that is possible: tests of checkpoints sync hundreds of files, which a disk takes a minute for.
    const bool in_memory = ::access("/dev/shm", W_OK | X_OK) == 0;
    const auto parent = in_memory ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path();
    std::string name = (parent / "fox-test-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::filesystem::filesystem_error("mkdtemp", name, std::error_code());
    path_ = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace fox::test
