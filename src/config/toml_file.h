#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

namespace fox {

/// A TOML file as JSON, with the place of each key.
struct TomlFile {
  nlohmann::json root = nlohmann::json::object();
  std::map<std::string, std::string> places;  ///< "train.lr" → "run.toml:12"

  /// Throws Error when the file cannot be read and UsageError, with the line, when it is not TOML or holds dates.
  static TomlFile read(const std::filesystem::path& file);
  /// Applies `--set table.key=value`: the value is TOML's, or else a string. Throws UsageError.
  void set(const std::string& assignment);
};

/// A JSON object of tables as TOML; keys that are null are left out.
std::string to_toml(const nlohmann::ordered_json& root);

}  // namespace fox
