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

/// All keys in which two configurations (RunConfig::to_json) differ, as "train.lr is 0.001 THERE and 0.002 HERE" with
/// these two names.
std::vector<std::string> all_differences(const nlohmann::json& there, const nlohmann::json& here,
                                         const std::string& there_name, const std::string& here_name);

/// The same, named "there" and "here", without the keys that change neither what is learnt nor what is measured:
/// output.* (where and how often something is written), data.cache, train.device, .threads, .max_bad_steps,
/// .activation_checkpointing, .deterministic, .shard_optimizer, .rank_timeout_s, .sequence_ranks and .cuda_graph.
std::vector<std::string> config_differences(nlohmann::json there, nlohmann::json here);

/// The folder of one training run, for the one process that writes in it:
///   run.toml (the configuration in full), run.json (the same, with versions, commit, and every time the run was
///   started or continued), metrics.jsonl, tb/, tokens/, checkpoints/.
class RunDirectory {
 public:
  /// Makes the folder, or enters that of an existing run. Throws fox::Error when another process trains in it, or when
  /// it holds a run with another configuration: its differences are listed and nothing is changed. `init_from` is the
  /// folder that the first weights came from; an existing run remembers its own.
  RunDirectory(const RunConfig& config, const std::optional<std::filesystem::path>& init_from);
  /// Removes a folder that it made and in which no training began, unless it holds something (token stores).
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const std::optional<std::filesystem::path>& init_from() const { return init_from_; }

  /// Notes in run.json that training starts or goes on at `tokens` with this data (any JSON that identifies it), this
  /// many parameters and on so many ranks. Throws fox::Error when an existing run was started on other data.
  void begin(int64_t tokens, const nlohmann::json& data, int64_t parameters, int ranks = 1);

 private:
  std::filesystem::path path_;
  std::optional<std::filesystem::path> init_from_;
  RunConfig config_;
  bool made_;  ///< here
  std::unique_ptr<DirectoryLock> lock_;
  nlohmann::json run_;  ///< run.json
};

}  // namespace fox::train
