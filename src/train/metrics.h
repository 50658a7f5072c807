#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>

namespace fox::train {

/// metrics.jsonl: one JSON object a line, written out at once, so that others can follow a run. Every line has "kind"
/// and "step".
class MetricsLog {
 public:
  /// Continues the file at `path`, or starts it. Lines of steps after `step` and a line that a crash cut short are
  /// removed: the steps they tell of are about to be done again.
  MetricsLog(std::filesystem::path path, int64_t step);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  /// Numbers that are not finite become null, as JSON has none. Throws fox::Error when the line cannot be written.
  void write(const nlohmann::json& line);
  /// fsync: called before a checkpoint, whose lines must not be lost when the checkpoint is not.
  void sync();

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace fox::train
