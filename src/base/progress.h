#pragma once

#include <cstdint>
#include <string>

namespace fox {

/// A progress bar on standard error for work of known length. On a terminal one line is redrawn (at most ten times a
/// second); elsewhere a plain line is printed at most every `plain_interval_s` seconds, and at the end.
class Progress {
 public:
  Progress(std::string label, int64_t total, std::string unit, double plain_interval_s = 10);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// `done` of `total` units; `note` is shown after the bar (loss, gradient norm, …). Units/s and time left are added.
  void update(int64_t done, const std::string& note = "");
  /// Prints a line of its own above the bar.
  void message(const std::string& line);
  void finish();

 private:
  void draw(const std::string& note, bool last);
  std::string label_, unit_, note_;
  int64_t total_, done_ = 0, first_ = -1;
  double started_, last_drawn_ = 0, plain_interval_s_;
  bool terminal_, finished_ = false;
};

/// 1234567 → "1.23M", 12 → "12".
std::string human_count(double value);
/// Seconds → "1h 02m", "3m 05s", "12.3s".
std::string human_time(double seconds);
/// Bytes → "1.2 GiB".
std::string human_bytes(double bytes);

}  // namespace fox
