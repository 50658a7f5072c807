#include "checkpoint/hf_directory.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "base/files.h"

namespace fox::checkpoint {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Python's json module writes Infinity and NaN bare (time_step_limit of Mamba-2), which JSON does not have. Outside of
// strings they become the largest number, which bounds as little, and null.
std::string with_standard_numbers(std::string_view text) {
  std::string result;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (in_string && text[i] == '\\' && i + 1 < text.size()) {
      result.append(text.substr(i++, 2));
      continue;
    }
    if (text[i] == '"') in_string = !in_string;
    if (!in_string && text.substr(i, 8) == "Infinity") {
      result += "1.7976931348623157e308";
      i += 7;
    } else if (!in_string && text.substr(i, 3) == "NaN") {
      result += "null";
      i += 2;
    } else {
      result += text[i];
    }
  }
  return result;
}

json read_json(const fs::path& path) {
  const std::string text = read_file(path);
  try {
    return json::parse(with_standard_numbers(text));
  } catch (const json::parse_error& error) {
    throw Error(fmt::format("{} is not JSON (byte {})", path.string(), error.byte), "the file is damaged or cut short");
  }
}

// Which file holds which tensor, as the index says.
std::map<std::string, std::string> read_index(const fs::path& path) {
  const json index = read_json(path);
  const auto it = index.is_object() ? index.find("weight_map") : index.end();
  if (it == index.end() || !it->is_object()) {
    throw Error(fmt::format("{} has no weight_map", path.string()), "it should map each tensor's name to a file");
  }
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : it->items()) {
    // A file outside the directory is no shard of it.
    if (!file.is_string() || fs::path(file.get<std::string>()).filename() != file.get<std::string>()) {
      throw Error(
          fmt::format("{}: weight_map of '{}' is {}, not a file of this folder", path.string(), name, file.dump()),
          "the index is damaged, or of another kind of checkpoint");
    }
    files[name] = file.get<std::string>();
  }
  return files;
}

NamedTensors read_shards(const fs::path& dir, const fs::path& index_path) {
  const auto file_of = read_index(index_path);
  std::set<std::string> files;
  for (const auto& [name, file] : file_of) files.insert(file);
  NamedTensors tensors;
  std::string problems;
  for (const auto& file : files) {
    for (auto& [name, tensor] : read_safetensors(dir / file).tensors) {
      const auto it = file_of.find(name);
      if (it == file_of.end() || it->second != file) {
        problems += fmt::format("{}'{}' in {} is not listed there", problems.empty() ? "" : ", ", name, file);
      } else {
        tensors.emplace(name, tensor);
      }
    }
  }
  for (const auto& [name, file] : file_of) {
    if (!tensors.contains(name))
      problems += fmt::format("{}'{}' is not in {}", problems.empty() ? "" : ", ", name, file);
  }
  if (problems.empty()) return tensors;
  throw Error(fmt::format("{} does not agree with its shards: {}", index_path.string(), problems),
              "fetch or save the whole folder again");
}

// Shapes as a reader knows them: 3x4.
std::string shape_text(at::IntArrayRef shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape.begin(), shape.end(), "x"));
}

}  // namespace

json read_config_json(const fs::path& dir) { return read_json(dir / "config.json"); }

NamedTensors read_weights(const fs::path& dir) {
  const auto single = dir / "model.safetensors", index = dir / "model.safetensors.index.json";
  if (fs::exists(single)) return read_safetensors(single).tensors;
  if (fs::exists(index)) return read_shards(dir, index);
  throw Error(fmt::format("{} has no weights", dir.string()),
              "a model folder holds model.safetensors, or model.safetensors.index.json and its shards");
}

void load_into(const NamedTensors& from, const NamedTensors& into, const std::string& where,
               const std::vector<std::string>& tied) {
  const std::set<std::string> optional(tied.begin(), tied.end());
  std::vector<std::string> problems;
  for (const auto& [name, target] : into) {
    const auto it = from.find(name);
    if (it == from.end()) {
      if (!optional.contains(name)) problems.push_back(fmt::format("'{}' is missing", name));
    } else if (it->second.sizes() != target.sizes()) {
      problems.push_back(
          fmt::format("'{}' is {} instead of {}", name, shape_text(it->second.sizes()), shape_text(target.sizes())));
    }
  }
  for (const auto& [name, tensor] : from) {
    if (!into.contains(name) && !optional.contains(name))
      problems.push_back(fmt::format("'{}' is not part of the model", name));
  }
  if (!problems.empty()) {
    throw Error(fmt::format("{} does not fit the model: {}", where, fmt::join(problems, ", ")),
                "the weights belong to another configuration");
  }
  at::NoGradGuard no_grad;
  for (const auto& [name, target] : into) {
    if (const auto it = from.find(name); it != from.end()) target.copy_(it->second);
  }
}

}  // namespace fox::checkpoint
