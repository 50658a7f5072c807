#include "base/event_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/files.h"

// The three messages of tensorflow/core/{util/event,framework/summary,framework/tensor}.proto that are needed are
// written field by field with protobuf's own encoder: a few lines here against three .proto files and their compiler.
namespace fox {
namespace {

namespace fs = std::filesystem;
namespace pb = google::protobuf::io;
using Wire = google::protobuf::internal::WireFormatLite;

constexpr size_t kHeader = 12;  // length (8), its checksum (4)
constexpr size_t kFooter = 4;   // checksum of the event

std::array<uint32_t, 256> crc32c_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
    table[i] = crc;
  }
  return table;
}

/// CRC-32C, rotated and shifted as TFRecord files want it (a checksum of data that holds checksums is weak otherwise).
uint32_t masked_crc32c(std::string_view bytes) {
  static const auto table = crc32c_table();
  uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes) crc = table[(crc ^ static_cast<uint8_t>(byte)) & 0xFF] ^ (crc >> 8);
  crc = ~crc;
  return std::rotr(crc, 15) + 0xA282EAD8u;
}

template <class T>
std::string raw(T value) {
  static_assert(std::endian::native == std::endian::little);
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T from_raw(std::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

std::string encode(const std::function<void(pb::CodedOutputStream&)>& write) {
  std::string bytes;
  pb::StringOutputStream stream(&bytes);
  pb::CodedOutputStream out(&stream);
  write(out);
  out.Trim();
  return bytes;
}

void write_bytes(int field, const std::string& bytes, pb::CodedOutputStream& out) {
  Wire::WriteBytes(field, bytes, &out);
}

/// Event {double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5}
std::string event(int64_t step, int payload_field, const std::string& payload) {
  const std::chrono::duration<double> wall_time = std::chrono::system_clock::now().time_since_epoch();
  return encode([&](pb::CodedOutputStream& out) {
    Wire::WriteDouble(1, wall_time.count(), &out);
    Wire::WriteInt64(2, step, &out);
    write_bytes(payload_field, payload, out);
  });
}

/// Summary {repeated Value value = 1}
std::string summary(const std::string& value) {
  return encode([&](pb::CodedOutputStream& out) { write_bytes(1, value, out); });
}

/// The step of an event; 0 is not written by other writers.
int64_t step_of(std::string_view event) {
  pb::CodedInputStream in(reinterpret_cast<const uint8_t*>(event.data()), static_cast<int>(event.size()));
  while (const uint32_t tag = in.ReadTag()) {
    if (Wire::GetTagFieldNumber(tag) == 2) {
      uint64_t step = 0;
      return in.ReadVarint64(&step) ? static_cast<int64_t>(step) : 0;
    }
    if (!Wire::SkipField(&in, tag)) return 0;
  }
  return 0;
}

/// The leading records of `content` that are whole and whose step is at most `step`.
std::string_view records_until(std::string_view content, int64_t step) {
  size_t kept = 0;
  while (content.size() - kept >= kHeader + kFooter) {
    const auto length = from_raw<uint64_t>(content.substr(kept));
    if (from_raw<uint32_t>(content.substr(kept + 8)) != masked_crc32c(content.substr(kept, 8))) break;
    if (length > content.size() - kept - kHeader - kFooter) break;
    const auto event = content.substr(kept + kHeader, length);
    if (from_raw<uint32_t>(content.substr(kept + kHeader + length)) != masked_crc32c(event)) break;
    if (step_of(event) > step) break;
    kept += kHeader + length + kFooter;
  }
  return content.substr(0, kept);
}

std::optional<fs::path> existing_file(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (entry.path().filename().string().starts_with("events.out.tfevents.")) return entry.path();
  }
  return std::nullopt;
}

[[noreturn]] void fail(const fs::path& path) {
  throw Error(fmt::format("cannot write {}: {}", path.string(), std::generic_category().message(errno)),
              "check that the disk has space and the folder may be written");
}

}  // namespace

EventFile::EventFile(const fs::path& folder, int64_t step) {
  std::error_code error;
  fs::create_directories(folder, error);
  errno = error.value();
  if (error) fail(folder);
  bool empty = true;
  if (const auto existing = existing_file(folder)) {
    path_ = *existing;
    const std::string content = read_file(path_);
    const auto kept = records_until(content, step);
    if (kept.size() < content.size()) write_file_atomically(path_, kept);
    empty = kept.empty();
  } else {
    // TensorBoard orders the files of a folder by the seconds in their names.
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    path_ =
        folder / fmt::format("events.out.tfevents.{:010d}.fox", std::chrono::floor<std::chrono::seconds>(now).count());
  }
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(path_);
  if (empty) append(event(0, 3, "brain.Event:2"));
}

EventFile::~EventFile() {
  if (fd_ >= 0) ::close(fd_);
}

void EventFile::scalar(int64_t step, std::string_view tag, double value) {
  // Value {string tag = 1; float simple_value = 2}
  append(event(step, 5, summary(encode([&](pb::CodedOutputStream& out) {
                 write_bytes(1, std::string(tag), out);
                 Wire::WriteFloat(2, static_cast<float>(value), &out);
               }))));
}

void EventFile::text(int64_t step, std::string_view tag, std::string_view text) {
  constexpr int kDtString = 7;
  // SummaryMetadata {PluginData plugin_data = 1 {string plugin_name = 1}}
  const auto plugin = encode([&](pb::CodedOutputStream& out) { write_bytes(1, "text", out); });
  const auto metadata = encode([&](pb::CodedOutputStream& out) { write_bytes(1, plugin, out); });
  // TensorProto {DataType dtype = 1; TensorShapeProto tensor_shape = 2; repeated bytes string_val = 8}: no shape, a
  // scalar
  const auto tensor = encode([&](pb::CodedOutputStream& out) {
    Wire::WriteEnum(1, kDtString, &out);
    write_bytes(2, "", out);
    write_bytes(8, std::string(text), out);
  });
  // Value {string tag = 1; TensorProto tensor = 8; SummaryMetadata metadata = 9}
  append(event(step, 5, summary(encode([&](pb::CodedOutputStream& out) {
                 write_bytes(1, std::string(tag), out);
                 write_bytes(8, tensor, out);
                 write_bytes(9, metadata, out);
               }))));
}

void EventFile::append(const std::string& event) {
  const std::string length = raw<uint64_t>(event.size());
  const std::string record = length + raw(masked_crc32c(length)) + event + raw(masked_crc32c(event));
  // One write a record: a reader sees it whole or not at all.
  size_t done = 0;
  while (done < record.size()) {
    const ssize_t n = ::write(fd_, record.data() + done, record.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_);
    done += static_cast<size_t>(n);
  }
}

}  // namespace fox
