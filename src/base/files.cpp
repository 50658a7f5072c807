#include "base/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"

namespace fox {

namespace fs = std::filesystem;

namespace {

constexpr size_t kBlock = 1 << 20;

std::string hint_for(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "free some space or write to another disk";
    case EACCES:
    case EPERM:
    case EROFS:
      return "write to a folder that you may change";
    case ENOENT:
      return "check the path";
    case ENOTDIR:
      return "a part of the path is a file, not a folder";
    case EISDIR:
      return "this is a folder; name a file";
    default:
      return "";
  }
}

[[noreturn]] void fail(const char* verb, const fs::path& path, int error) {
  throw Error(fmt::format("cannot {} {}: {}", verb, path.string(), std::generic_category().message(error)),
              hint_for(error));
}

/// A file descriptor that is closed at the end of the scope.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  /// Closes and reports: on network file systems a full disk may only show here.
  int close() { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

size_t read_some(int fd, char* to, size_t size, const fs::path& path) {
  for (;;) {
    const ssize_t n = ::read(fd, to, size);
    if (n >= 0) return static_cast<size_t>(n);
    if (errno != EINTR) fail("read", path, errno);
  }
}

/// The new content of `target`, in a hidden file beside it until it is complete. A pipe or a device (/dev/stdout) is
/// written to as it stands: a file renamed to its place would replace it.
class NewFile {
 public:
  explicit NewFile(const fs::path& target)
      : target_(target),
        beside_(is_special(target) ? target : name_beside(target)),
        fd_(open_new(beside_, target)),
        renamed_(beside_ == target) {
    buffer_.reserve(kBlock);
  }
  ~NewFile() {
    if (!renamed_) ::unlink(beside_.c_str());
  }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  void append(const void* data, size_t size) {
    if (buffer_.size() + size > kBlock) flush();
    if (size >= kBlock) {
      write_all(static_cast<const char*>(data), size);
    } else {
      buffer_.append(static_cast<const char*>(data), size);
    }
  }

  void finish() {
    flush();
    if (::fsync(fd_.get()) != 0 && !renamed_) fail("write", target_, errno);
    if (fd_.close() != 0) fail("write", target_, errno);
    if (renamed_) return;
    if (::rename(beside_.c_str(), target_.c_str()) != 0) fail("write", target_, errno);
    renamed_ = true;
    sync_path(target_.has_parent_path() ? target_.parent_path() : fs::path("."));
  }

 private:
  static bool is_special(const fs::path& target) {
    std::error_code ignored;
    const auto kind = fs::status(target, ignored).type();
    return kind == fs::file_type::character || kind == fs::file_type::block || kind == fs::file_type::fifo ||
           kind == fs::file_type::socket;
  }
  static fs::path name_beside(const fs::path& target) {
    static std::atomic<uint64_t> count{0};
    return target.parent_path() / fmt::format(".{}.new-{}-{}", target.filename().string(), ::getpid(), count++);
  }
  static int open_new(const fs::path& beside, const fs::path& target) {
    const int fd = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) fail("write", target, errno);
    return fd;
  }
  void flush() {
    write_all(buffer_.data(), buffer_.size());
    buffer_.clear();
  }
  void write_all(const char* data, size_t size) {
    while (size > 0) {
      const ssize_t n = ::write(fd_.get(), data, size);
      if (n < 0) {
        if (errno == EINTR) continue;
        fail("write", target_, errno);
      }
      data += n;
      size -= static_cast<size_t>(n);
    }
  }

  fs::path target_, beside_;
  Descriptor fd_;
  std::string buffer_;
  bool renamed_;  ///< nothing is left beside the target
};

std::string hex(XXH128_hash_t hash) { return fmt::format("{:016x}{:016x}", hash.high64, hash.low64); }

int open_for_reading(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("read", path, errno);
  return fd;
}

}  // namespace

std::string read_file(const fs::path& path) {
  Descriptor fd(open_for_reading(path));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) fail("read", path, errno);
  // One byte more than the size, so that the end is seen without growing. Pipes and files of /proc say a size of 0.
  std::string content(std::max<size_t>(static_cast<size_t>(info.st_size) + 1, 4096), '\0');
  size_t used = 0;
  while (const size_t n = read_some(fd.get(), content.data() + used, content.size() - used, path)) {
    used += n;
    if (used == content.size()) content.resize(2 * used);
  }
  content.resize(used);
  return content;
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  write_file_atomically(path, [&](const auto& append) { append(content.data(), content.size()); });
}

void write_file_atomically(const fs::path& path,
                           const std::function<void(const std::function<void(const void*, size_t)>&)>& write) {
  NewFile file(path);
  write([&](const void* data, size_t size) { file.append(data, size); });
  file.finish();
}

void remove_others(const fs::path& dir, const std::function<bool(const std::string& name)>& keep) {
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (!keep(entry.path().filename().string())) others.push_back(entry.path());
  }
  for (const fs::path& other : others) fs::remove_all(other);
}

void sync_path(const fs::path& path) {
  Descriptor fd(open_for_reading(path));
  // Some file systems have nothing to sync for a folder and say EINVAL.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) fail("sync", path, errno);
}

struct Checksum::State {
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> xxh3{XXH3_createState(), XXH3_freeState};
};

Checksum::Checksum() : state_(std::make_unique<State>()) { XXH3_128bits_reset(state_->xxh3.get()); }
Checksum::~Checksum() = default;
void Checksum::update(const void* data, size_t size) { XXH3_128bits_update(state_->xxh3.get(), data, size); }
std::string Checksum::digest() const { return hex(XXH3_128bits_digest(state_->xxh3.get())); }

std::string file_checksum(const fs::path& path) {
  Descriptor fd(open_for_reading(path));
  Checksum checksum;
  const auto block = std::make_unique_for_overwrite<char[]>(kBlock);
  while (const size_t n = read_some(fd.get(), block.get(), kBlock, path)) checksum.update(block.get(), n);
  return checksum.digest();
}

std::string bytes_checksum(std::string_view bytes) { return hex(XXH3_128bits(bytes.data(), bytes.size())); }

DirectoryLock::DirectoryLock(const fs::path& dir) {
  const fs::path file = dir / ".lock";
  fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("lock", dir, errno);
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) {
    // For the message of whoever comes second; the lock itself is the kernel's and ends with the process.
    const std::string pid = std::to_string(::getpid());
    if (::ftruncate(fd_, 0) != 0 || ::pwrite(fd_, pid.data(), pid.size(), 0) < 0) {
      const int error = errno;
      ::close(fd_);
      fail("lock", dir, error);
    }
    return;
  }
  const int error = errno;
  char pid[32] = {};
  const ssize_t n = ::pread(fd_, pid, sizeof(pid) - 1, 0);
  ::close(fd_);
  if (error != EWOULDBLOCK) fail("lock", dir, error);
  throw Error(
      fmt::format("{} is in use by {}", dir.string(), n > 0 ? fmt::format("process {}", pid) : "another process"),
      "wait until it has ended, or stop it");
}

DirectoryLock::~DirectoryLock() { ::close(fd_); }

}  // namespace fox
