#include "checkpoint/checkpoint_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"

namespace fox::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "tokens-";
constexpr const char* kChecksums = "checksums.json";

}  // namespace

std::string checkpoint_name(int64_t tokens) { return fmt::format("{}{:015d}", kPrefix, tokens); }

std::vector<CheckpointEntry> list_checkpoints(const fs::path& folder) {
  std::vector<CheckpointEntry> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kPrefix) || !entry.is_directory()) continue;
    int64_t tokens = 0;
    const char* end = name.data() + name.size();
    const auto [stop, status] = std::from_chars(name.data() + kPrefix.size(), end, tokens);
    if (status == std::errc() && stop == end) found.push_back({tokens, entry.path()});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.tokens < b.tokens; });
  return found;
}

bool has_checksums(const fs::path& dir) { return fs::exists(dir / kChecksums); }

void write_checksums(const fs::path& dir) {
  auto sums = nlohmann::json::object();
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.is_regular_file()) sums[entry.path().filename().string()] = file_checksum(entry.path());
  }
  write_file_atomically(dir / kChecksums, sums.dump(2) + "\n");
}

std::string checkpoint_damage(const fs::path& dir) {
  nlohmann::json sums;
  try {
    sums = nlohmann::json::parse(read_file(dir / kChecksums));
  } catch (const Error&) {
    return fmt::format("it has no {}", kChecksums);
  } catch (const nlohmann::json::exception&) {
    return fmt::format("its {} is damaged", kChecksums);
  }
  if (!sums.is_object() || !sums.contains("model.safetensors")) return fmt::format("its {} is damaged", kChecksums);
  for (const auto& [name, sum] : sums.items()) {
    // A name that leads out of the folder is not one that we wrote.
    if (!sum.is_string() || fs::path(name).filename() != name) return fmt::format("its {} is damaged", kChecksums);
    try {
      if (file_checksum(dir / name) != sum.get<std::string>()) return name + " does not have its checksum";
    } catch (const Error&) {
      return name + " is missing or cannot be read";
    }
  }
  return "";
}

std::optional<CheckpointEntry> newest_checkpoint(const fs::path& folder,
                                                 const std::function<void(const std::string&)>& warn) {
  const auto entries = list_checkpoints(folder);
  for (auto entry = entries.rbegin(); entry != entries.rend(); ++entry) {
    const std::string damage = checkpoint_damage(entry->dir);
    if (damage.empty()) return *entry;
    if (warn) warn(fmt::format("checkpoint {} is skipped: {}", entry->dir.string(), damage));
  }
  if (entries.empty()) return std::nullopt;
  throw Error(fmt::format("none of the checkpoints in {} is complete", folder.string()),
              "bring one back from a copy, or delete the run's folder to start again");
}

}  // namespace fox::checkpoint
