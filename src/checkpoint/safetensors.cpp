#include "checkpoint/safetensors.h"

#include <ATen/Functions.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "checkpoint/safetensors_header.h"

namespace fox::checkpoint {
namespace {

struct DtypeName {
  const char* name;
  at::ScalarType dtype;
};

constexpr std::array<DtypeName, 15> kDtypes{{{"F64", at::kDouble},
                                             {"F32", at::kFloat},
                                             {"F16", at::kHalf},
                                             {"BF16", at::kBFloat16},
                                             {"I64", at::kLong},
                                             {"I32", at::kInt},
                                             {"I16", at::kShort},
                                             {"I8", at::kChar},
                                             {"U8", at::kByte},
                                             {"U64", at::kUInt64},
                                             {"U32", at::kUInt32},
                                             {"U16", at::kUInt16},
                                             {"BOOL", at::kBool},
                                             {"F8_E4M3", at::kFloat8_e4m3fn},
                                             {"F8_E5M2", at::kFloat8_e5m2}}};

// The header's parser let only names of this table through.
at::ScalarType dtype_of(const std::string& name) {
  return std::find_if(kDtypes.begin(), kDtypes.end(), [&](const auto& known) { return name == known.name; })->dtype;
}

std::string name_of(at::ScalarType dtype, const std::string& tensor) {
  for (const auto& known : kDtypes) {
    if (dtype == known.dtype) return known.name;
  }
  throw Error(fmt::format("tensor '{}' has dtype {}, which safetensors cannot hold", tensor, c10::toString(dtype)),
              "convert it to a real dtype first");
}

/// A file opened for reading at any offset.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path) : path_(path), fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    struct stat info {};
    if (fd_ < 0 || ::fstat(fd_, &info) != 0) fail(errno);
    if (!S_ISREG(info.st_mode)) {
      ::close(fd_);
      throw Error(fmt::format("{} is not a file", path_.string()), "name a .safetensors file");
    }
    size_ = static_cast<uint64_t>(info.st_size);
  }
  ~InputFile() { ::close(fd_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  uint64_t size() const { return size_; }

  void read(void* to, uint64_t bytes, uint64_t offset) const {
    auto* next = static_cast<char*>(to);
    while (bytes > 0) {
      const ssize_t n = ::pread(fd_, next, bytes, static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(errno);
      if (n == 0)
        throw Error(fmt::format("{} became shorter while it was read", path_.string()),
                    "is something else writing it?");
      next += n, offset += static_cast<uint64_t>(n), bytes -= static_cast<uint64_t>(n);
    }
  }

 private:
  [[noreturn]] void fail(int error) const {
    throw Error(fmt::format("cannot read {}: {}", path_.string(), std::strerror(error)), "check the path");
  }
  std::filesystem::path path_;
  int fd_;
  uint64_t size_ = 0;
};

struct Layout {
  Header header;
  uint64_t data_begin = 0;
};

Layout read_layout(const InputFile& file, const std::string& where) {
  const uint64_t size = file.size();
  if (size < 8)
    throw Error(fmt::format("{} is not a safetensors file: it has only {} bytes", where, size),
                "the file is incomplete");
  std::array<unsigned char, 8> length_bytes;
  file.read(length_bytes.data(), 8, 0);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | length_bytes[i];
  // The claim is compared with the file before anything of that size is allocated.
  if (length > size - 8) {
    throw Error(fmt::format("{} claims a header of {} bytes but has only {} bytes", where, length, size),
                "the file is damaged, incomplete, or not a safetensors file");
  }
  std::string text(length, '\0');
  file.read(text.data(), length, 8);
  return {parse_header(text, size - 8 - length, where), 8 + length};
}

}  // namespace

SafetensorsFile read_safetensors(const std::filesystem::path& path) {
  const InputFile file(path);
  const auto layout = read_layout(file, path.string());
  SafetensorsFile result{{}, layout.header.metadata};
  for (const auto& entry : layout.header.tensors) {
    auto tensor = at::empty(entry.shape, dtype_of(entry.dtype));
    file.read(tensor.data_ptr(), entry.end - entry.begin, layout.data_begin + entry.begin);
    result.tensors.emplace(entry.name, std::move(tensor));
  }
  return result;
}

SafetensorsFile read_safetensors_header(const std::filesystem::path& path) {
  const InputFile file(path);
  const auto layout = read_layout(file, path.string());
  SafetensorsFile result{{}, layout.header.metadata};
  for (const auto& entry : layout.header.tensors) {
    const auto options = at::dtype(dtype_of(entry.dtype)).device(at::kMeta);
    result.tensors.emplace(entry.name, at::empty(entry.shape, options));
  }
  return result;
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const uint64_t end = offset + tensor.nbytes();
    header[name] = {{"dtype", name_of(tensor.scalar_type(), name)},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begins on 8 bytes, so that it may be mapped and used in place
  std::array<unsigned char, 8> length;
  for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(text.size() >> 8 * i);
  write_file_atomically(path, [&](const auto& append) {
    append(length.data(), length.size());
    append(text.data(), text.size());
    for (const auto& [name, tensor] : tensors) {
      const auto bytes = tensor.detach().to(at::kCPU).contiguous();
      append(bytes.data_ptr(), bytes.nbytes());
    }
  });
}

}  // namespace fox::checkpoint
