#include "train/checkpoint_store.h"

#include <fmt/format.h>

#include <vector>

#include "base/error.h"
#include "base/files.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using checkpoint::CheckpointEntry;

constexpr std::string_view kWriting = ".writing-";
constexpr std::string_view kDeleting = ".deleting-";

[[noreturn]] void fail(const char* verb, const fs::path& path, const std::error_code& error) {
  throw Error(fmt::format("cannot {} {}: {}", verb, path.string(), error.message()),
              "check that the disk has space and the folder may be written");
}

void move_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error) fail("write", to, error);
}

/// Renamed first, so that a crash in the middle leaves nothing that looks like a damaged checkpoint.
void remove_checkpoint(const fs::path& dir) {
  const fs::path doomed = dir.parent_path() / fmt::format("{}{}", kDeleting, dir.filename().string());
  move_folder(dir, doomed);
  std::error_code error;
  fs::remove_all(doomed, error);
  if (error) fail("delete", doomed, error);
}

}  // namespace

CheckpointStore::CheckpointStore(fs::path folder, CheckpointStoreOptions options)
    : folder_(std::move(folder)), options_(std::move(options)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error) fail("make", folder_, error);
  std::vector<fs::path> stale;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kWriting) || name.starts_with(kDeleting)) stale.push_back(entry.path());
  }
  for (const auto& path : stale) {
    fs::remove_all(path, error);
    if (error) fail("delete", path, error);
  }
}

fs::path CheckpointStore::save(int64_t tokens, const std::function<void(const fs::path&)>& write) {
  const std::string name = checkpoint::checkpoint_name(tokens);
  fs::path target = folder_ / name;
  const fs::path beside = folder_ / fmt::format("{}{}", kWriting, name);
  std::error_code error;
  fs::create_directory(beside, error);
  if (error) fail("write", beside, error);
  try {
    stage("begin");
    write(beside);
    stage("files");
    checkpoint::write_checksums(beside);  // the last file; syncs the folder too
    stage("checksums");
    // Only a damaged one, skipped when the run was resumed, can stand here.
    if (fs::exists(target)) remove_checkpoint(target);
    move_folder(beside, target);
    sync_path(folder_);
  } catch (...) {
    fs::remove_all(beside, error);  // frees the disk that may just have filled up
    throw;
  }
  stage("renamed");
  prune(tokens);
  stage("pruned");
  return target;
}

void CheckpointStore::prune(int64_t newest_tokens) const {
  // Those beyond the newest are damaged ones that a resumed run has yet to write again; they take no other's place.
  std::vector<CheckpointEntry> candidates;
  for (auto& entry : checkpoint::list_checkpoints(folder_)) {
    if (entry.tokens <= newest_tokens) candidates.push_back(std::move(entry));
  }
  int64_t window = 0;  // of keep_every_tokens; the first checkpoint in each survives, so the rule holds its ground
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto& entry = candidates[i];
    bool keep = static_cast<int64_t>(candidates.size() - i) <= options_.keep_last;
    if (options_.keep_every_tokens > 0 && entry.tokens / options_.keep_every_tokens > window) {
      window = entry.tokens / options_.keep_every_tokens;
      keep = true;
    }
    if (!keep) remove_checkpoint(entry.dir);
  }
}

std::optional<CheckpointEntry> CheckpointStore::newest(const std::function<void(const std::string&)>& warn) const {
  return checkpoint::newest_checkpoint(folder_, warn);
}

}  // namespace fox::train
