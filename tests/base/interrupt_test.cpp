#include "base/interrupt.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/version.h"

namespace fox {
namespace {

int exit_status_of_child(void (*body)()) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Interrupt, FirstSignalRaisesAFlag) {
  EXPECT_EQ(exit_status_of_child([] {
              catch_interrupts();
              if (interrupted()) ::_exit(1);
              ::raise(SIGINT);
              ::_exit(interrupted() ? 42 : 2);
            }),
            42);
  EXPECT_EQ(exit_status_of_child([] {
              catch_interrupts();
              ::raise(SIGTERM);
              ::_exit(interrupted() ? 42 : 2);
            }),
            42);
}

TEST(Interrupt, SecondSignalEndsTheProcess) {
  EXPECT_EQ(exit_status_of_child([] {
              catch_interrupts();
              ::raise(SIGINT);
              ::raise(SIGINT);
            }),
            130);
  EXPECT_EQ(exit_status_of_child([] {
              catch_interrupts();
              ::raise(SIGINT);
              ::raise(SIGTERM);
            }),
            143);
}

TEST(Version, NamesReleaseAndCommit) {
  EXPECT_EQ(version().find_first_not_of("0123456789."), std::string::npos);
  const std::string hash = commit().substr(0, commit().find("-dirty"));
  EXPECT_TRUE(hash == "unknown" ||
              (hash.size() == 40 && hash.find_first_not_of("0123456789abcdef") == std::string::npos))
      << hash;
}

}  // namespace
}  // namespace fox
