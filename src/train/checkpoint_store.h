#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/checkpoint_folder.h"

namespace fox::train {

struct CheckpointStoreOptions {
  int64_t keep_last = 2;          ///< at least 1
  int64_t keep_every_tokens = 0;  ///< the first checkpoint of each so many tokens stays for good; 0: none does
  /// Called as a save goes on: "begin", "files", "checksums", "renamed", "pruned". Tests stop the process there.
  std::function<void(std::string_view stage)> on_stage;
};

/// The checkpoints of one run, for the one process that writes them. A checkpoint is written into a folder
/// .writing-*, synced, and renamed: whoever looks, at whatever moment and after whatever crash, finds only whole ones.
class CheckpointStore {
 public:
  /// Makes `folder` if need be and removes what an earlier process left half-written or half-deleted.
  CheckpointStore(std::filesystem::path folder, CheckpointStoreOptions options);

  /// Has `write` fill the folder that it is given with files (each synced, as write_file_atomically does), then makes
  /// this the checkpoint at `tokens` and deletes those no longer kept. Throws what `write` throws (disk full, …); all
  /// earlier checkpoints then still stand.
  std::filesystem::path save(int64_t tokens, const std::function<void(const std::filesystem::path& dir)>& write);

  /// checkpoint::newest_checkpoint of the folder.
  std::optional<checkpoint::CheckpointEntry> newest(const std::function<void(const std::string&)>& warn) const;

 private:
  void stage(std::string_view name) const {
    if (options_.on_stage) options_.on_stage(name);
  }
  void prune(int64_t newest_tokens) const;

  std::filesystem::path folder_;
  CheckpointStoreOptions options_;
};

}  // namespace fox::train
