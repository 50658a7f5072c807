#include "base/file_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace fox {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, int error) {
  throw Error(fmt::format("cannot read {}: {}", path.string(), std::generic_category().message(error)),
              "check the path");
}

}  // namespace

FileReader::FileReader(std::filesystem::path path) : path_(std::move(path)) {
  fd_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat info {};
  if (fd_ >= 0 && ::fstat(fd_, &info) == 0) {
    size_ = info.st_size;
    return;
  }
  const int error = errno;
  if (fd_ >= 0) ::close(fd_);
  fail(path_, error);
}

FileReader::~FileReader() { ::close(fd_); }

void FileReader::read(int64_t first, int64_t count, void* out) const {
  auto* to = static_cast<char*>(out);
  while (count > 0) {
    const ssize_t n = ::pread(fd_, to, static_cast<size_t>(count), first);
    if (n == 0) throw Error(fmt::format("{} has become shorter", path_.string()), "is another program writing it?");
    if (n < 0 && errno != EINTR) fail(path_, errno);
    if (n < 0) continue;
    to += n;
    first += n;
    count -= n;
  }
}

}  // namespace fox
