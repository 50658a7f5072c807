#include "train/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "base/files.h"

namespace fox::train {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path) {
  throw Error(fmt::format("cannot write {}: {}", path.string(), std::generic_category().message(errno)),
              "check that the disk has space and the folder may be written");
}

/// The leading lines of `content` that are whole and whose step is at most `step`.
std::string_view lines_until(std::string_view content, int64_t step) {
  size_t kept = 0;
  for (size_t end; (end = content.find('\n', kept)) != std::string_view::npos; kept = end + 1) {
    const auto line = nlohmann::json::parse(content.substr(kept, end - kept), nullptr, /*allow_exceptions=*/false);
    if (!line.is_object() || !line.contains("step") || !line["step"].is_number_integer()) break;
    if (line["step"].get<int64_t>() > step) break;
  }
  return content.substr(0, kept);
}

}  // namespace

MetricsLog::MetricsLog(std::filesystem::path path, int64_t step) : path_(std::move(path)) {
  if (std::filesystem::exists(path_)) {
    const std::string content = read_file(path_);
    const auto kept = lines_until(content, step);
    if (kept.size() < content.size()) write_file_atomically(path_, kept);
  }
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) fail(path_);
}

MetricsLog::~MetricsLog() { ::close(fd_); }

void MetricsLog::write(const nlohmann::json& line) {
  // Sample text may end inside a character; the replacement keeps the line valid.
  const std::string text = line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = ::write(fd_, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_);
    done += static_cast<size_t>(n);
  }
}

void MetricsLog::sync() {
  if (::fsync(fd_) != 0) fail(path_);
}

}  // namespace fox::train
