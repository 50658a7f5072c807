#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/files.h"
#include "config/run_config.h"

namespace fox::train {

/// Differences between two configurations (RunConfig::to_json), as "train.lr is 0.001 there and 0.002 here". Left out
/// are the keys that change neither what is learnt nor what is measured: output.* (where and how often something is
/// written), data.cache, train.device, train.threads, train.max_bad_steps, train.activation_checkpointing and
/// train.deterministic.
std::vector<std::string> config_differences(const nlohmann::json& there, const nlohmann::json& here);

/// The folder of one training run, for the one process that trains in it:
///   run.toml (the configuration in full), run.json (the same, with versions, commit, and every time the run was
///   started or continued), metrics.jsonl, tb/, tokens/, checkpoints/.
class RunDirectory {
 public:
  /// Makes the folder, or enters that of an existing run. Throws fox::Error when another process trains in it, or when
  /// it holds a run with another configuration: its differences are listed and nothing is changed. `init_from` is the
  /// folder that the first weights came from; an existing run remembers its own.
  RunDirectory(const RunConfig& config, const std::optional<std::filesystem::path>& init_from);

  const std::filesystem::path& path() const { return path_; }
  const std::optional<std::filesystem::path>& init_from() const { return init_from_; }

  /// Notes in run.json that training starts or goes on at `tokens` with this data (any JSON that identifies it) and
  /// this many parameters. Throws fox::Error when an existing run was started on other data.
  void begin(int64_t tokens, const nlohmann::json& data, int64_t parameters);

 private:
  std::filesystem::path path_;
  std::optional<std::filesystem::path> init_from_;
  RunConfig config_;
  std::unique_ptr<DirectoryLock> lock_;
  nlohmann::json run_;  ///< run.json
};

}  // namespace fox::train
