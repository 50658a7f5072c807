#include "train/checkpoint_store.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "support/temporary_folder.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;

// A checkpoint whose files tell which one it is.
void write_files(const fs::path& dir, int64_t tokens, size_t size = 1000) {
  write_file_atomically(dir / "config.json", std::to_string(tokens));
  write_file_atomically(dir / "model.safetensors", std::string(size, static_cast<char>('a' + tokens % 26)));
}

void save(CheckpointStore& store, int64_t tokens, size_t size = 1000) {
  store.save(tokens, [&](const fs::path& dir) { write_files(dir, tokens, size); });
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename().string());
  return names;
}

std::set<int64_t> tokens_in(const fs::path& folder) {
  std::set<int64_t> tokens;
  for (const auto& entry : checkpoint::list_checkpoints(folder)) tokens.insert(entry.tokens);
  return tokens;
}

int64_t newest_tokens(const CheckpointStore& store, std::vector<std::string>* warnings = nullptr) {
  const auto entry = store.newest([&](const std::string& line) {
    if (warnings) warnings->push_back(line);
  });
  return entry ? entry->tokens : -1;
}

TEST(CheckpointStore, NamesAreSortedByTokens) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path() / "checkpoints", {});
  EXPECT_EQ(newest_tokens(store), -1);
  save(store, 1024);
  save(store, 2048);
  EXPECT_EQ(names_in(folder.path() / "checkpoints"),
            (std::set<std::string>{"tokens-000000000001024", "tokens-000000000002048"}));
  EXPECT_EQ(newest_tokens(store), 2048);
}

TEST(CheckpointStore, KeepsTheLastAndOneOfEachInterval) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path(), {.keep_last = 2, .keep_every_tokens = 1000, .on_stage = {}});
  for (int64_t tokens = 300; tokens <= 3300; tokens += 300) save(store, tokens);
  // First at or past 1000, 2000 and 3000, and the last two.
  EXPECT_EQ(tokens_in(folder.path()), (std::set<int64_t>{1200, 2100, 3000, 3300}));
}

TEST(CheckpointStore, EachKindOfDamageIsSkippedWithAWarning) {
  const auto damage = [](const std::function<void(const fs::path&)>& spoil) {
    test::TemporaryFolder folder;
    CheckpointStore store(folder.path(), {});
    save(store, 1);
    save(store, 2);
    spoil(folder.path() / checkpoint::checkpoint_name(2));
    std::vector<std::string> warnings;
    EXPECT_EQ(newest_tokens(store, &warnings), 1);
    EXPECT_EQ(warnings.size(), 1u);
    return warnings.empty() ? "" : warnings[0];
  };
  EXPECT_NE(damage([](const auto& dir) { fs::remove(dir / "model.safetensors"); }).find("model.safetensors is missing"),
            std::string::npos);
  EXPECT_NE(damage([](const auto& dir) { fs::resize_file(dir / "model.safetensors", 999); }).find("checksum"),
            std::string::npos);
  EXPECT_NE(damage([](const auto& dir) {
              std::fstream file(dir / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
              file.seekp(500);
              file.put('!');
            }).find("model.safetensors does not have its checksum"),
            std::string::npos);
  EXPECT_NE(damage([](const auto& dir) { fs::remove(dir / "checksums.json"); }).find("checksums.json"),
            std::string::npos);
  EXPECT_NE(damage([](const auto& dir) { fs::resize_file(dir / "checksums.json", 10); }).find("checksums.json"),
            std::string::npos);
  EXPECT_NE(damage([](const auto& dir) { std::ofstream(dir / "checksums.json") << "{}"; }).find("checksums.json"),
            std::string::npos);
  EXPECT_NE(damage([](const auto& dir) {
              fs::remove_all(dir);
              fs::create_directory(dir);
            }).find("checksums.json"),
            std::string::npos);
}

TEST(CheckpointStore, DoesNotStartOverWhenAllAreDamaged) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path(), {});
  save(store, 1);
  fs::remove(folder.path() / checkpoint::checkpoint_name(1) / "model.safetensors");
  EXPECT_THROW(store.newest({}), Error);
}

TEST(CheckpointStore, ADamagedOneIsReplacedAndTakesNoOthersPlace) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path(), {.keep_last = 1, .keep_every_tokens = 0, .on_stage = {}});
  save(store, 300);
  fs::resize_file(folder.path() / checkpoint::checkpoint_name(300) / "model.safetensors", 1);
  save(store, 100);
  save(store, 200);
  EXPECT_EQ(newest_tokens(store), 200);
  EXPECT_EQ(tokens_in(folder.path()), (std::set<int64_t>{200, 300}));
  save(store, 300);
  EXPECT_EQ(newest_tokens(store), 300);
  EXPECT_EQ(tokens_in(folder.path()), (std::set<int64_t>{300}));
}

// The process ends at each stage of a save: what is found afterwards is the old checkpoint or the new one, whole, and
// the remains are cleared away.
TEST(CheckpointStore, EndsAtAnyStageLeaveAWholeCheckpoint) {
  for (const std::string stage : {"begin", "files", "checksums", "renamed", "pruned"}) {
    test::TemporaryFolder folder;
    CheckpointStore first(folder.path(), {});
    save(first, 1);
    const pid_t child = ::fork();
    if (child == 0) {
      CheckpointStore store(folder.path(), {.keep_last = 1, .keep_every_tokens = 0, .on_stage = [&](auto reached) {
                                              if (reached == stage) ::raise(SIGKILL);
                                            }});
      save(store, 2);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << stage;
    CheckpointStore again(folder.path(), {});
    EXPECT_EQ(newest_tokens(again), stage == "renamed" || stage == "pruned" ? 2 : 1) << stage;
    for (const auto& name : names_in(folder.path())) EXPECT_TRUE(name.starts_with("tokens-")) << name;
  }
}

// Runs `body` in a process of its own, so that limits and privileges that it changes stay there.
void in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// As a full disk does, a limit on the size of files makes write() fail in the middle of a file.
TEST(CheckpointStore, AFileThatCannotBeWrittenKeepsTheOldOne) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path(), {.keep_last = 1, .keep_every_tokens = 0, .on_stage = {}});
  save(store, 1);
  in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      save(store, 2, 3 << 20);
    } catch (const Error& error) {
      return std::string(error.what()).find("model.safetensors") != std::string::npos;
    }
    return false;
  });
  EXPECT_EQ(newest_tokens(store), 1);
  EXPECT_EQ(names_in(folder.path()),
            std::set<std::string>{checkpoint::checkpoint_name(1)});  // and the space is free again
}

TEST(CheckpointStore, AFullDiskKeepsTheOldOne) {
  test::TemporaryFolder folder;
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "may not mount a small disk";
  {
    CheckpointStore store(folder.path(), {.keep_last = 1, .keep_every_tokens = 0, .on_stage = {}});
    save(store, 1, 400'000);
    save(store, 2, 400'000);
    EXPECT_THROW(save(store, 3, 900'000), Error);
    EXPECT_EQ(newest_tokens(store), 2);
    save(store, 4, 400'000);
    EXPECT_EQ(newest_tokens(store), 4);
  }
  ::umount(folder.path().c_str());
}

TEST(CheckpointStore, AReadOnlyFolderIsAnErrorThatNamesIt) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path(), {});
  save(store, 1);
  in_child([&] {
    ::chmod(folder.path().c_str(), 0555);
    if (::geteuid() == 0 && ::setuid(65534) != 0) return false;  // permissions do not bind the administrator
    try {
      save(store, 2);
    } catch (const Error& error) {
      return std::string(error.what()).find(folder.path().string()) != std::string::npos;
    }
    return false;
  });
  ::chmod(folder.path().c_str(), 0755);
  EXPECT_EQ(newest_tokens(store), 1);
}

}  // namespace
}  // namespace fox::train
