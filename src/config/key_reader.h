#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace fox {

/// The numbers a key accepts.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool open = false;  ///< min itself is outside

  static Range at_least(double min) { return {.min = min}; }
  static Range above(double min) { return {.min = min, .open = true}; }
  static Range between(double min, double max) { return {.min = min, .max = max}; }
};

/// Reads the keys of one JSON object into variables and notices the keys that nobody asked for. Every error is a
/// fox::Error that names the source and the full path of the key ("model.num_heads").
///
///     KeyReader reader(json, "config.json");
///     reader.read("num_heads", heads, Range::at_least(1));  // a missing key leaves the variable as it is
///     reader.finish();                                      // unknown keys: an error with the nearest known one
class KeyReader {
 public:
  /// `prefix` leads the key in messages and ends with '.' when not empty.
  KeyReader(const nlohmann::json& object, std::string source, std::string prefix = "");

  /// What a message says of where a key stands, given the full path of the key (say, file and line). Default: `source`.
  void set_locator(std::function<std::string(const std::string& path)> locate) { locate_ = std::move(locate); }

  /// True when the key is there and not null.
  bool has(const std::string& key) const;

  // A missing key changes nothing. A whole number may be written as 1e6. Throws on another type and outside `range`.
  void read(const std::string& key, bool& value);
  void read(const std::string& key, int64_t& value, Range range = {});
  void read(const std::string& key, uint64_t& value, Range range = {});
  void read(const std::string& key, double& value, Range range = {});
  void read(const std::string& key, std::string& value);
  /// A string, or a list of strings.
  void read(const std::string& key, std::vector<std::string>& value);
  /// A list of numbers.
  void read(const std::string& key, std::vector<double>& value, Range range = {});
  /// One of `choices`.
  void read_choice(const std::string& key, std::string& value, const std::vector<std::string>& choices);

  /// null means nothing.
  template <typename T, typename... Rest>
  void read(const std::string& key, std::optional<T>& value, Rest... rest) {
    known_.push_back(key);
    if (!object_.contains(key)) return;
    if (object_.at(key).is_null()) {
      value.reset();
      return;
    }
    T present{};
    read(key, present, rest...);
    value = std::move(present);
  }

  /// The object under a key (empty when missing), to be read with the same rules.
  KeyReader table(const std::string& key);

  /// Keys that are known but say nothing to us.
  void accept(const std::vector<std::string>& keys);

  /// Throws when the object has keys that were neither read nor accepted: all are listed, each with the nearest known
  /// one.
  void finish() const;

  /// Throws an Error about a key: "<source>: '<path>' <problem>".
  [[noreturn]] void fail(const std::string& key, const std::string& problem, const std::string& hint) const;

 private:
  const nlohmann::json* find(const std::string& key);
  /// `left_out`: the value the key has when it is not given, for the hint; 0 when that is not known.
  void check_range(const std::string& key, double value, Range range, double left_out) const;
  std::string where(const std::string& key) const;

  nlohmann::json object_;
  std::string source_, prefix_;
  std::function<std::string(const std::string&)> locate_;
  std::vector<std::string> known_;
};

}  // namespace fox
