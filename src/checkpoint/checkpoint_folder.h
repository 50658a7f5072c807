#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace fox::checkpoint {

// A run keeps its checkpoints in one folder, each in a folder tokens-%015d of its own, the number being the tokens
// trained on. A checkpoint is complete when checksums.json lists its files and every one of them still has its sum.

/// "tokens-000000001048576".
std::string checkpoint_name(int64_t tokens);

struct CheckpointEntry {
  int64_t tokens = 0;
  std::filesystem::path dir;
};

/// The checkpoints below `folder`, complete or not, fewest tokens first; none when there is no such folder.
std::vector<CheckpointEntry> list_checkpoints(const std::filesystem::path& folder);

/// Whether dir/checksums.json is there: then checkpoint_damage can tell.
bool has_checksums(const std::filesystem::path& dir);

/// Writes dir/checksums.json over all files of `dir`: {"model.safetensors": "<XXH3-128>", …}.
void write_checksums(const std::filesystem::path& dir);

/// Why `dir` is not a complete checkpoint ("model.safetensors does not have its checksum"), or "" when it is one.
std::string checkpoint_damage(const std::filesystem::path& dir);

/// The complete checkpoint with the most tokens, nothing when there is none at all; `warn` gets one line for each newer
/// one that is skipped. Throws fox::Error when there are checkpoints but each of them is damaged: a run that started
/// over in silence would be lost.
std::optional<CheckpointEntry> newest_checkpoint(const std::filesystem::path& folder,
                                                 const std::function<void(const std::string&)>& warn = {});

}  // namespace fox::checkpoint
