#include "data/byte_source.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>
#include <zstd.h>

#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "data/corpus_files.h"

namespace fox::data {

namespace {

constexpr size_t kReadBytes = 1 << 18;

struct StreamDeleter {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};

}  // namespace

struct ByteSource::Impl {
  explicit Impl(const std::filesystem::path& the_file)
      : file(the_file), fd(::open(the_file.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd < 0) fail(errno);
    if (!is_compressed(file)) return;
    stream.reset(ZSTD_createDStream());
    // Frames of --ultra and --long are read too; the window is what memory they cost.
    ZSTD_DCtx_setParameter(stream.get(), ZSTD_d_windowLogMax, 31);
  }
  ~Impl() { ::close(fd); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[noreturn]] void fail(int error) const {
    throw Error(fmt::format("cannot read {}: {}", file.string(), std::generic_category().message(error)),
                "check the path");
  }

  /// Reads up to `size` bytes of the file to `to`.
  size_t take(char* to, size_t size) {
    for (;;) {
      const ssize_t n = ::read(fd, to, size);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(errno);
      hash.update(to, static_cast<size_t>(n));
      stored += n;
      return static_cast<size_t>(n);
    }
  }

  bool read_plain(size_t size, std::string& out) {
    const size_t before = out.size();
    out.resize(before + size);
    const size_t n = take(out.data() + before, size);
    out.resize(before + n);
    return n > 0;
  }

  bool read_compressed(size_t size, std::string& out) {
    const size_t before = out.size();
    out.resize(before + size);
    ZSTD_outBuffer to{out.data() + before, size, 0};
    while (to.pos == 0) {
      if (input.pos == input.size && !pending) {
        buffer.resize(kReadBytes);
        input = {buffer.data(), take(buffer.data(), buffer.size()), 0};
        if (input.size == 0) break;
      }
      const size_t left = ZSTD_decompressStream(stream.get(), &to, &input);
      if (ZSTD_isError(left)) {
        throw Error(
            fmt::format("{} cannot be decompressed near byte {}: {}", file.string(), stored, ZSTD_getErrorName(left)),
            "the file is damaged: fetch it again");
      }
      within_frame = left != 0;
      pending = within_frame && to.pos == to.size;
    }
    out.resize(before + to.pos);
    if (to.pos == 0 && within_frame) {
      throw Error(fmt::format("{} ({} bytes) ends within a Zstandard frame", file.string(), stored),
                  "the file is not complete: fetch it again");
    }
    return to.pos > 0;
  }

  std::filesystem::path file;
  int fd;
  int64_t stored = 0;
  Checksum hash;
  std::unique_ptr<ZSTD_DStream, StreamDeleter> stream;  // null: not compressed
  std::vector<char> buffer;
  ZSTD_inBuffer input{nullptr, 0, 0};
  bool within_frame = false;
  bool pending = false;  // the decoder may hold output for which there was no room
};

ByteSource::ByteSource(const std::filesystem::path& file) : impl_(std::make_unique<Impl>(file)) {}
ByteSource::~ByteSource() = default;
ByteSource::ByteSource(ByteSource&&) noexcept = default;
ByteSource& ByteSource::operator=(ByteSource&&) noexcept = default;

bool ByteSource::read(size_t size, std::string& out) {
  return impl_->stream ? impl_->read_compressed(size, out) : impl_->read_plain(size, out);
}
int64_t ByteSource::stored() const { return impl_->stored; }
std::string ByteSource::checksum() const { return impl_->hash.digest(); }

}  // namespace fox::data
