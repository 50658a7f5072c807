#include "config/key_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/nearest.h"

namespace fox {
namespace {

// A value as a message shows it: what was written, but never a page of it.
std::string shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

std::string must_be(const std::string& what, const nlohmann::json& value) {
  return fmt::format("must be {}, not {}", what, shown(value));
}

// The whole number that a JSON value stands for, if it is one and `T` can hold it.
template <typename T>
std::optional<T> whole_number(const nlohmann::json& value) {
  if (value.is_number_unsigned()) {
    const auto n = value.get<uint64_t>();
    if (n > static_cast<uint64_t>(std::numeric_limits<T>::max())) return std::nullopt;
    return static_cast<T>(n);
  }
  if (value.is_number_integer()) {
    const auto n = value.get<int64_t>();
    if (n < 0 && std::is_unsigned_v<T>) return std::nullopt;
    return static_cast<T>(n);
  }
  // 2^53: beyond it a double no longer tells neighbouring integers apart.
  if (value.is_number_float()) {
    const double x = value.get<double>();
    if (x == std::floor(x) && std::abs(x) <= 9007199254740992.0 && (x >= 0 || std::is_signed_v<T>)) {
      return static_cast<T>(x);
    }
  }
  return std::nullopt;
}

}  // namespace

KeyReader::KeyReader(const nlohmann::json& object, std::string source, std::string prefix)
    : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {
  if (object_.is_object()) return;
  const auto name = prefix_.empty() ? source_ : fmt::format("{}: '{}'", source_, prefix_.substr(0, prefix_.size() - 1));
  throw Error(fmt::format("{} {}", name, must_be("an object of keys and values", object_)),
              "docs/formats.md shows one");
}

std::string KeyReader::where(const std::string& key) const { return locate_ ? locate_(prefix_ + key) : source_; }

void KeyReader::fail(const std::string& key, const std::string& problem, const std::string& hint) const {
  throw Error(fmt::format("{}: '{}{}' {}", where(key), prefix_, key, problem), hint);
}

bool KeyReader::has(const std::string& key) const { return object_.contains(key) && !object_.at(key).is_null(); }

const nlohmann::json* KeyReader::find(const std::string& key) {
  known_.push_back(key);
  const auto it = object_.find(key);
  return it == object_.end() ? nullptr : &*it;
}

void KeyReader::check_range(const std::string& key, double value, Range range, double left_out) const {
  const auto inside = [&](double x) { return (range.open ? x > range.min : x >= range.min) && x <= range.max; };
  if (inside(value)) return;  // NaN is never inside
  const std::string most = std::isinf(range.max) ? "" : fmt::format(" and at most {}", range.max);
  fail(key, fmt::format("must be {} {}{}, not {}", range.open ? "above" : "at least", range.min, most, value),
       left_out != 0 && inside(left_out) ? fmt::format("left out, it is {}", left_out) : "choose one in that range");
}

void KeyReader::read(const std::string& key, bool& value) {
  const auto* json = find(key);
  if (!json) return;
  if (!json->is_boolean()) fail(key, must_be("true or false", *json), fmt::format("for example: {} = {}", key, !value));
  value = json->get<bool>();
}

void KeyReader::read(const std::string& key, int64_t& value, Range range) {
  const auto* json = find(key);
  if (!json) return;
  const auto number = whole_number<int64_t>(*json);
  if (!number) fail(key, must_be("a whole number", *json), "written like 4, without quotes");
  check_range(key, static_cast<double>(*number), range, static_cast<double>(value));
  value = *number;
}

void KeyReader::read(const std::string& key, uint64_t& value, Range range) {
  const auto* json = find(key);
  if (!json) return;
  const auto number = whole_number<uint64_t>(*json);
  if (!number) fail(key, must_be("a whole number that is not negative", *json), "written like 4, without quotes");
  check_range(key, static_cast<double>(*number), range, static_cast<double>(value));
  value = *number;
}

void KeyReader::read(const std::string& key, double& value, Range range) {
  const auto* json = find(key);
  if (!json) return;
  if (!json->is_number()) fail(key, must_be("a number", *json), "written like 0.1 or 1e-3, without quotes");
  check_range(key, json->get<double>(), range, value);
  value = json->get<double>();
}

void KeyReader::read(const std::string& key, std::string& value) {
  const auto* json = find(key);
  if (!json) return;
  if (!json->is_string())
    fail(key, must_be("a string", *json), fmt::format("in quotes: \"{}\"", value.empty() ? "text" : value));
  value = json->get<std::string>();
}

void KeyReader::read(const std::string& key, std::vector<std::string>& value) {
  const auto* json = find(key);
  if (!json) return;
  const auto list = json->is_array() ? *json : nlohmann::json::array({*json});
  if (!std::all_of(list.begin(), list.end(), [](const auto& item) { return item.is_string(); })) {
    fail(key, must_be("a string or a list of strings", *json), "in quotes: [\"one\", \"two\"]");
  }
  value = list.get<std::vector<std::string>>();
}

void KeyReader::read(const std::string& key, std::vector<double>& value, Range range) {
  const auto* json = find(key);
  if (!json) return;
  if (!json->is_array() ||
      !std::all_of(json->begin(), json->end(), [](const auto& item) { return item.is_number(); })) {
    fail(key, must_be("a list of numbers", *json), "written like [1, 2]");
  }
  for (const auto& item : *json) check_range(key, item.get<double>(), range, 0);
  value = json->get<std::vector<double>>();
}

void KeyReader::read_choice(const std::string& key, std::string& value, const std::vector<std::string>& choices) {
  std::string chosen = value;
  read(key, chosen);
  if (!object_.contains(key)) return;
  if (std::find(choices.begin(), choices.end(), chosen) == choices.end()) {
    fail(key, fmt::format("cannot be \"{}\"", chosen), suggest(chosen, choices));
  }
  value = chosen;
}

KeyReader KeyReader::table(const std::string& key) {
  const auto* json = find(key);
  KeyReader reader(json ? *json : nlohmann::json::object(), source_, prefix_ + key + ".");
  reader.locate_ = locate_;
  return reader;
}

void KeyReader::accept(const std::vector<std::string>& keys) { known_.insert(known_.end(), keys.begin(), keys.end()); }

void KeyReader::finish() const {
  std::vector<std::string> known = known_, unknown;
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  for (const auto& [key, value] : object_.items()) {
    if (!std::binary_search(known.begin(), known.end(), key)) unknown.push_back(key);
  }
  if (unknown.empty()) return;
  if (unknown.size() == 1) fail(unknown[0], "is not a known key", suggest(unknown[0], known));
  std::string names, hint;
  for (const auto& key : unknown) {
    names += fmt::format("{}'{}{}'", names.empty() ? "" : ", ", prefix_, key);
    if (const auto match = nearest(key, known); !match.empty()) {
      hint += fmt::format("{}for '{}' did you mean '{}'?", hint.empty() ? "" : " ", key, match);
    }
  }
  throw Error(fmt::format("{}: {} are not known keys", where(unknown[0]), names),
              hint.empty() ? suggest("", known) : hint);
}

}  // namespace fox
