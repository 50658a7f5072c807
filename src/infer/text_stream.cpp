#include "infer/text_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "base/error.h"

namespace fox::infer {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

bool between(unsigned char c, int low, int high) { return c >= low && c <= high; }

/// Bytes that the lead byte announces; 0 for a byte that leads nothing.
size_t announced_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (between(lead, 0xC2, 0xDF)) return 2;
  if (between(lead, 0xE0, 0xEF)) return 3;
  if (between(lead, 0xF0, 0xF4)) return 4;
  return 0;
}

/// The second byte's range is narrower after some leads: no overlong forms, no surrogates, nothing above U+10FFFF.
bool second_byte_fits(unsigned char lead, unsigned char second) {
  if (lead == 0xE0) return between(second, 0xA0, 0xBF);
  if (lead == 0xED) return between(second, 0x80, 0x9F);
  if (lead == 0xF0) return between(second, 0x90, 0xBF);
  if (lead == 0xF4) return between(second, 0x80, 0x8F);
  return between(second, 0x80, 0xBF);
}

/// Length of the longest beginning of `bytes` that is, or may become, one character; 0 when its first byte leads
/// nothing.
size_t well_formed_length(std::string_view bytes) {
  const auto lead = static_cast<unsigned char>(bytes[0]);
  const size_t wanted = announced_length(lead);
  size_t n = std::min<size_t>(wanted, 1);
  while (n < wanted && n < bytes.size()) {
    const auto c = static_cast<unsigned char>(bytes[n]);
    if (n == 1 ? !second_byte_fits(lead, c) : !between(c, 0x80, 0xBF)) break;
    ++n;
  }
  return n;
}

}  // namespace

std::string Utf8Repair::push(std::string_view bytes) {
  pending_ += bytes;
  std::string out;
  size_t at = 0;
  while (at < pending_.size()) {
    const std::string_view rest = std::string_view(pending_).substr(at);
    const size_t wanted = announced_length(static_cast<unsigned char>(rest[0]));
    const size_t n = well_formed_length(rest);
    if (n == rest.size() && n < wanted) break;  // may still become whole
    if (n == wanted && n > 0) {
      out += rest.substr(0, n);
    } else {
      out += kReplacement;
    }
    at += std::max<size_t>(n, 1);
  }
  pending_.erase(0, at);
  return out;
}

std::string Utf8Repair::finish() {
  std::string out(pending_.empty() ? std::string_view() : kReplacement);
  pending_.clear();
  return out;
}

TextStream::TextStream(std::vector<std::string> stop) : stop_(std::move(stop)) {
  for (const std::string& s : stop_) {
    if (s.empty()) throw Error("a stop string is empty", "leave it out, or give the text to stop before");
    Utf8Repair repair;
    if (repair.push(s) + repair.finish() != s) {
      throw Error(
          fmt::format("the stop string of {} bytes is not UTF-8, so generated text can never hold it", s.size()),
          "give it as UTF-8 text");
    }
  }
}

std::string TextStream::push(std::string_view bytes) {
  if (stopped_) return "";
  return filter(repair_.push(bytes));
}

std::string TextStream::finish() {
  if (stopped_) return "";
  std::string out = filter(repair_.finish());
  if (!stopped_) out += held_;
  held_.clear();
  return out;
}

std::string TextStream::filter(std::string_view text) {
  // What is held was searched before, so only stop strings that end in the new text are looked for.
  size_t searched = held_.size();
  held_ += text;
  for (size_t end = searched + 1; end <= held_.size(); ++end) {
    const std::string_view head = std::string_view(held_).substr(0, end);
    size_t longest = 0;
    for (const std::string& s : stop_) {
      if (head.ends_with(s)) longest = std::max(longest, s.size());
    }
    if (longest == 0) continue;
    stopped_ = true;
    std::string out(head.substr(0, end - longest));
    held_.clear();
    return out;
  }
  size_t keep = 0;
  for (const std::string& s : stop_) {
    for (size_t n = std::min(s.size() - 1, held_.size()); n > keep; --n) {
      if (std::string_view(held_).ends_with(std::string_view(s).substr(0, n))) keep = n;
    }
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return out;
}

}  // namespace fox::infer
