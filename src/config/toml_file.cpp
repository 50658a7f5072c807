#include "config/toml_file.h"

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <stdexcept>

// toml++ 3.3 has assertions that damaged text can reach: they become errors like any other. With NDEBUG it would assume
// instead that they hold.
#undef NDEBUG
constexpr void toml_assert(bool holds) {
  if (!holds) throw std::logic_error("this is not TOML");
}
#define TOML_ASSERT(condition) toml_assert(static_cast<bool>(condition))
#include <toml++/toml.h>

#include "base/error.h"
#include "base/files.h"

namespace fox {

namespace {

using nlohmann::json;

constexpr const char* kTomlHint = "run files are TOML: https://toml.io";

/// One node and all below it; the places of keys go to `file`.
class Converter {
 public:
  Converter(TomlFile& file, std::string source) : file_(file), source_(std::move(source)) {}

  json convert(const toml::node& node, const std::string& path) {
    if (const auto* table = node.as_table()) return object(*table, path);
    if (const auto* array = node.as_array()) {
      json list = json::array();
      for (const toml::node& item : *array) list.push_back(convert(item, path));
      return list;
    }
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* number = node.as_integer()) return number->get();
    if (const auto* flag = node.as_boolean()) return flag->get();
    const auto* number = node.as_floating_point();
    if (!number) fail(node, path, "cannot be a date or a time", "give a number, a string, true or false");
    if (!std::isfinite(number->get())) fail(node, path, "must be finite", "give a finite number");
    return number->get();
  }

 private:
  [[noreturn]] void fail(const toml::node& node, const std::string& path, const std::string& problem,
                         const std::string& hint) const {
    throw UsageError(fmt::format("{}: '{}' {}", place(node), path, problem), hint);
  }
  std::string place(const toml::node& node) const {
    const auto line = node.source().begin.line;
    return line > 0 && source_.rfind("--set", 0) != 0 ? fmt::format("{}:{}", source_, line) : source_;
  }
  json object(const toml::table& table, const std::string& path) {
    json result = json::object();
    for (const auto& [key, value] : table) {
      const std::string name(key.str());
      const std::string below = path.empty() ? name : fmt::format("{}.{}", path, name);
      file_.places[below] = place(value);
      result[name] = convert(value, below);
    }
    return result;
  }

  TomlFile& file_;
  std::string source_;
};

/// The value of a command line's `key=value`; nothing for a bare word.
std::optional<toml::table> parse_value(const std::string& value, const std::string& assignment) {
  try {
    toml::table table = toml::parse("value = " + value);
    if (table.size() == 1) return table;
  } catch (const toml::parse_error& error) {
    // What begins like a string, a list or a table was not meant as a bare word.
    if (!value.empty() && std::string_view("\"'[{").find(value[0]) != std::string_view::npos) {
      throw UsageError(fmt::format("--set {}: {}", assignment, error.description()), "the value is read as TOML's");
    }
  } catch (const std::logic_error& error) {
    throw UsageError(fmt::format("--set {}: {}", assignment, error.what()), "the value is read as TOML's");
  }
  return std::nullopt;
}

std::string toml_value(const nlohmann::ordered_json& value) {
  if (value.is_object()) {
    std::string keys;
    for (const auto& [key, inner] : value.items()) {
      if (!inner.is_null()) keys += fmt::format("{}{} = {}", keys.empty() ? "" : ", ", key, toml_value(inner));
    }
    return "{ " + keys + " }";
  }
  if (!value.is_array()) return value.dump();
  std::string list;
  for (const auto& item : value) list += (list.empty() ? "" : ", ") + toml_value(item);
  return "[" + list + "]";
}

}  // namespace

TomlFile TomlFile::read(const std::filesystem::path& path) {
  const std::string text = read_file(path), name = path.string();
  TomlFile file;
  try {
    const toml::table table = toml::parse(text, name);
    file.root = Converter(file, name).convert(table, "");
  } catch (const toml::parse_error& error) {
    throw UsageError(fmt::format("{}:{}: {}", name, error.source().begin.line, error.description()), kTomlHint);
  } catch (const std::logic_error& error) {
    throw UsageError(fmt::format("{}: {}", name, error.what()), kTomlHint);
  }
  return file;
}

void TomlFile::set(const std::string& assignment) {
  const size_t equals = assignment.find('='), dot = assignment.find('.');
  if (equals == std::string::npos || dot == std::string::npos || dot > equals) {
    throw UsageError(fmt::format("--set {} is not of the form table.key=value", assignment),
                     "for example: --set train.lr=0.002");
  }
  const std::string table = assignment.substr(0, dot), key = assignment.substr(dot + 1, equals - dot - 1);
  const std::string value = assignment.substr(equals + 1), path = table + "." + key, source = "--set " + assignment;
  if (root.contains(table) && !root[table].is_object())
    throw UsageError(fmt::format("{}: '{}' is no table", source, table), fmt::format("write it as [{}]", table));
  const auto parsed = parse_value(value, assignment);
  root[table][key] = parsed ? Converter(*this, source).convert(*parsed->get("value"), path) : json(value);
  places[path] = source;
  places.emplace(table, source);
}

std::string to_toml(const nlohmann::ordered_json& root) {
  std::string text;
  for (const auto& [name, table] : root.items()) {
    text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", name);
    for (const auto& [key, value] : table.items()) {
      if (!value.is_null()) text += fmt::format("{} = {}\n", key, toml_value(value));
    }
  }
  return text;
}

}  // namespace fox
