#include "base/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/error.h"

namespace fox {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info {};
  int error = fd < 0 || ::fstat(fd, &info) != 0 ? errno : 0;
  if (error == 0 && info.st_size > 0) {
    size_ = static_cast<size_t>(info.st_size);
    data_ = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data_ == MAP_FAILED) error = errno;
  }
  if (fd >= 0) ::close(fd);
  if (error == 0) return;
  throw Error(fmt::format("cannot read {}: {}", path.string(), std::generic_category().message(error)),
              "check the path");
}

MappedFile::~MappedFile() {
  if (size_ > 0) ::munmap(data_, size_);
}

}  // namespace fox
