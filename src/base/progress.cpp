#include "base/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace fox {

namespace {

constexpr double kRedrawSeconds = 0.1;
constexpr int kBarWidth = 24;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

size_t terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

/// Cuts after `columns` characters of UTF-8, so that a redrawn line never wraps.
std::string cut(const std::string& line, size_t columns) {
  size_t seen = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if ((line[i] & 0xC0) == 0x80) continue;
    if (seen++ == columns) return line.substr(0, i);
  }
  return line;
}

std::string bar(double share) {
  const int full = static_cast<int>(share * kBarWidth);
  std::string text = "[";
  for (int i = 0; i < kBarWidth; ++i) text += i < full ? '=' : (i == full ? '>' : ' ');
  return text + "]";
}

void print(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

Progress::Progress(std::string label, int64_t total, std::string unit, double plain_interval_s)
    : label_(std::move(label)),
      unit_(std::move(unit)),
      total_(total),
      started_(now()),
      last_drawn_(started_),
      plain_interval_s_(plain_interval_s),
      terminal_(::isatty(STDERR_FILENO) == 1) {}

Progress::~Progress() { finish(); }

void Progress::update(int64_t done, const std::string& note) {
  const double time = now();
  if (first_ < 0) {
    // A continued run starts in the middle: only what was done here counts for the speed.
    first_ = done;
    started_ = time;
  }
  done_ = done;
  note_ = note;
  if (time - last_drawn_ >= (terminal_ ? kRedrawSeconds : plain_interval_s_)) draw(note, false);
}

void Progress::message(const std::string& line) {
  print(terminal_ ? "\r\033[K" + line + "\n" : line + "\n");
  if (terminal_ && !finished_ && first_ >= 0) draw(note_, false);
}

void Progress::finish() {
  if (finished_) return;
  finished_ = true;
  if (first_ >= 0) draw(note_, true);
}

void Progress::draw(const std::string& note, bool last) {
  last_drawn_ = now();
  const double elapsed = last_drawn_ - started_;
  const double share = total_ > 0 ? std::clamp(static_cast<double>(done_) / static_cast<double>(total_), 0.0, 1.0) : 0;
  std::string line = label_;
  if (total_ > 0) {
    line += terminal_ ? fmt::format(" {}", bar(share)) : "";
    line += fmt::format(" {:.0f}% {}/{} {}", std::floor(share * 100), human_count(static_cast<double>(done_)),
                        human_count(static_cast<double>(total_)), unit_);
  } else {
    line += fmt::format(" {} {}", human_count(static_cast<double>(done_)), unit_);
  }
  if (elapsed > 0 && done_ > first_) {
    const double rate = static_cast<double>(done_ - first_) / elapsed;
    line += fmt::format(", {} {}/s", human_count(rate), unit_);
    if (last) {
      line += fmt::format(", took {}", human_time(elapsed));
    } else if (total_ > done_) {
      line += fmt::format(", {} left", human_time(static_cast<double>(total_ - done_) / rate));
    }
  }
  if (!note.empty()) line += fmt::format(", {}", note);
  if (terminal_) line = "\r\033[K" + cut(line, terminal_columns() - 1);
  print(line + (terminal_ && !last ? "" : "\n"));
}

std::string human_count(double value) {
  constexpr std::array<const char*, 5> kSuffixes = {"", "K", "M", "B", "T"};
  size_t suffix = 0;
  double scaled = value;
  // 999.5 would print as 1e+03: it goes up a unit with three digits already.
  while (std::abs(scaled) >= 999.5 && suffix + 1 < kSuffixes.size()) {
    scaled /= 1000;
    ++suffix;
  }
  if (suffix == 0 && value == std::floor(value)) return fmt::format("{:.0f}", value);
  const int decimals = std::abs(scaled) >= 99.95 ? 0 : std::abs(scaled) >= 9.995 ? 1 : 2;
  return fmt::format("{:.{}f}{}", scaled, decimals, kSuffixes[suffix]);
}

std::string human_time(double seconds) {
  // Rounded once, so that no field shows 60.
  if (seconds < 59.95) return fmt::format("{:.1f}s", std::max(seconds, 0.0));
  if (!std::isfinite(seconds)) return "?";
  const int64_t whole = std::llround(seconds);
  const int64_t minutes = whole / 60;
  if (minutes < 60) return fmt::format("{}m {:02}s", minutes, whole % 60);
  return fmt::format("{}h {:02}m", minutes / 60, minutes % 60);
}

std::string human_bytes(double bytes) {
  constexpr std::array<const char*, 6> kSuffixes = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t suffix = 0;
  while (std::abs(bytes) >= 1023.95 && suffix + 1 < kSuffixes.size()) {
    bytes /= 1024;
    ++suffix;
  }
  return suffix == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kSuffixes[suffix]);
}

}  // namespace fox
