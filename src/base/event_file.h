#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace fox {

/// A TensorBoard event file: records of {length, masked CRC-32C of it, a serialised tensorflow.Event, masked CRC-32C}.
/// Each record is written out at once.
class EventFile {
 public:
  /// Continues the event file in `folder` (made if need be), or starts one. Events of steps after `step` and a record
  /// that a crash cut short are removed. Throws Error naming the file when it cannot be written.
  EventFile(const std::filesystem::path& folder, int64_t step);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  void scalar(int64_t step, std::string_view tag, double value);
  /// Shown by TensorBoard's text plugin, which reads Markdown.
  void text(int64_t step, std::string_view tag, std::string_view text);

 private:
  void append(const std::string& event);

  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace fox
