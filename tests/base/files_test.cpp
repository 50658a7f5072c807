#include "base/files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "base/writable.h"
#include "support/temporary_folder.h"

namespace fox {
namespace {

namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(dir_)) found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }

  test::TemporaryFolder folder_;
  fs::path dir_ = folder_.path();
};

/// Runs `body` in a process of its own; true when it returned true there.
bool in_child(const std::function<bool()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body() ? 0 : 1);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

template <class Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(Files, ReadsBackWhatWasWritten) {
  std::string content(3 * (1 << 20) + 17, 'x');
  content[5] = '\0';
  write_file_atomically(dir_ / "a", content);
  EXPECT_EQ(read_file(dir_ / "a"), content);
  write_file_atomically(dir_ / "a", "");
  EXPECT_EQ(read_file(dir_ / "a"), "");
  EXPECT_EQ(names(), std::vector<std::string>{"a"});
}

TEST_F(Files, ReadsFilesOfEverySizeAndOfNone) {
  for (const size_t size : {1, 4094, 4095, 4096, 4097, 100'000}) {
    write_file_atomically(dir_ / "a", std::string(size, 'x'));
    EXPECT_EQ(read_file(dir_ / "a"), std::string(size, 'x'));
  }
  // Files of /proc say that they are empty.
  EXPECT_NE(read_file("/proc/self/status").find("VmPeak"), std::string::npos);
}

TEST_F(Files, PiecesOfEverySizeArriveInOrder) {
  std::string expected;
  write_file_atomically(dir_ / "a", [&](const auto& append) {
    for (const size_t size : {1u, 1000u, 0u, (1u << 20) - 1, 1u << 20, 5u, 3u << 20, 7u}) {
      const std::string piece(size, static_cast<char>('a' + expected.size() % 26));
      append(piece.data(), piece.size());
      expected += piece;
    }
  });
  EXPECT_EQ(read_file(dir_ / "a"), expected);
}

TEST_F(Files, RelativeNameInTheWorkingFolder) {
  EXPECT_TRUE(in_child([&] {
    fs::current_path(dir_);
    write_file_atomically("plain", "1");
    return read_file("plain") == "1";
  }));
}

// A file-size limit fails in the middle of the content exactly as a full disk does.
TEST_F(Files, FullDiskKeepsTheOldContentAndLeavesNothingBehind) {
  write_file_atomically(dir_ / "a", "old");
  EXPECT_TRUE(in_child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100'000, 100'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write_file_atomically(dir_ / "a", std::string(4 << 20, 'n'));
    } catch (const Error& error) {
      return std::string(error.what()).find("/a: ") != std::string::npos && !error.hint().empty();
    }
    return false;
  }));
  EXPECT_EQ(read_file(dir_ / "a"), "old");
  EXPECT_EQ(names(), std::vector<std::string>{"a"});
}

TEST_F(Files, PipesAndDevicesAreWrittenToAndStay) {
  const fs::path pipe = dir_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::string got;
  std::thread reader([&] { got = read_file(pipe); });
  write_file_atomically(pipe, "through");
  reader.join();
  EXPECT_EQ(got, "through");
  EXPECT_TRUE(fs::is_fifo(pipe));
  write_file_atomically("/dev/null", "nowhere");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_THROW(write_file_atomically("/dev/full", "no room"), Error);
}

TEST_F(Files, WriterThatThrowsKeepsTheOldContent) {
  write_file_atomically(dir_ / "a", "old");
  EXPECT_THROW(write_file_atomically(dir_ / "a",
                                     [](const auto& append) {
                                       append("new", 3);
                                       throw Error("half-way");
                                     }),
               Error);
  EXPECT_EQ(read_file(dir_ / "a"), "old");
  EXPECT_EQ(names(), std::vector<std::string>{"a"});
}

// Root may write to read-only folders, so the unwritable ones here are so for root too.
TEST_F(Files, UnwritablePlacesAreNamed) {
  write_file_atomically(dir_ / "file", "1");
  const std::string below_a_file = (dir_ / "file" / "a").string();
  EXPECT_NE(message_of([&] { write_file_atomically(below_a_file, "1"); }).find("cannot write " + below_a_file),
            std::string::npos);
  const std::string in_no_folder = (dir_ / "missing" / "a").string();
  EXPECT_NE(message_of([&] { write_file_atomically(in_no_folder, "1"); }).find("cannot write " + in_no_folder),
            std::string::npos);
  EXPECT_NE(message_of([&] { write_file_atomically("/proc/a", "1"); }).find("cannot write /proc/a"), std::string::npos);
  fs::create_directory(dir_ / "folder");
  EXPECT_NE(message_of([&] { write_file_atomically(dir_ / "folder", "1"); }).find("cannot write"), std::string::npos);
  EXPECT_EQ(names(), (std::vector<std::string>{"file", "folder"}));
}

TEST_F(Files, UnreadableFilesAreNamed) {
  EXPECT_EQ(message_of([&] { read_file("/no/such"); }), "cannot read /no/such: No such file or directory");
  EXPECT_NE(message_of([&] { read_file(dir_); }).find("cannot read " + dir_.string()), std::string::npos);
  EXPECT_NE(message_of([&] { file_checksum(dir_ / "x"); }).find("cannot read"), std::string::npos);
}

// Values of xxHash's own test suite and of `xxhsum -H2`.
TEST_F(Files, FoldersThatCannotBeWrittenAreNamed) {
  EXPECT_NO_THROW(check_writable(dir_));
  EXPECT_THROW(check_writable(dir_ / "absent"), Error);
  std::ofstream(dir_ / "file") << "x";
  EXPECT_THROW(check_writable(dir_ / "file"), Error);
  EXPECT_THROW(check_writable("/proc/self"), Error);
}

TEST_F(Files, RemovesAllButWhatIsKept) {
  fs::create_directories(dir_ / "folder" / "within");
  for (const char* name : {"a", "b", "folder/c"}) write_file_atomically(dir_ / name, name);
  remove_others(dir_, [](const std::string& name) { return name == "b"; });
  EXPECT_EQ(names(), std::vector<std::string>{"b"});
  remove_others(dir_, [](const std::string&) { return false; });
  EXPECT_TRUE(names().empty());
}

TEST_F(Files, ChecksumIsXxh3Of128Bits) {
  EXPECT_EQ(bytes_checksum(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(bytes_checksum("a"), "a96faf705af16834e6c632b61e964e1f");
  EXPECT_EQ(bytes_checksum("abc"), "06b05ab6733a618578af5f94892f3950");
  std::string long_content(5'000'003, '\0');
  for (size_t i = 0; i < long_content.size(); ++i) long_content[i] = static_cast<char>(i * i % 251);
  for (const std::string& content : {std::string(), std::string("abc"), long_content}) {
    write_file_atomically(dir_ / "a", content);
    EXPECT_EQ(file_checksum(dir_ / "a"), bytes_checksum(content));
  }
}

TEST_F(Files, LockKeepsAnotherProcessOutUntilReleased) {
  const auto can_lock = [&] { return message_of([&] { DirectoryLock lock(dir_); }); };
  {
    DirectoryLock lock(dir_);
    const std::string expected = dir_.string() + " is in use by process " + std::to_string(::getpid());
    EXPECT_TRUE(in_child([&] { return can_lock() == expected; }));
    EXPECT_EQ(can_lock(), expected) << "a second lock of the same process is refused too";
  }
  EXPECT_TRUE(in_child([&] { return can_lock() == "no error"; }));
  EXPECT_NE(message_of([&] { DirectoryLock lock(dir_ / "missing"); }).find("cannot lock"), std::string::npos);
}

TEST_F(Files, LockOfAKilledProcessIsFree) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t pid = ::fork();
  if (pid == 0) {
    DirectoryLock lock(dir_);
    if (::write(ready[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THROW(DirectoryLock{dir_}, Error);
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  EXPECT_NO_THROW(DirectoryLock{dir_});
}

}  // namespace
}  // namespace fox
