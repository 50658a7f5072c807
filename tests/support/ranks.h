#pragma once

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "dist/launch.h"

namespace fox::test {

/// How a rank ended.
struct Ended {
  std::string said;   ///< what its body returned
  std::string error;  ///< what() of what it threw
  bool killed = false;
};

namespace ranks {

inline void send(int pipe, char kind, const std::string& text) {
  const std::string message = kind + text;
  for (size_t sent = 0; sent < message.size();) {
    const ssize_t n = ::write(pipe, message.data() + sent, message.size() - sent);
    if (n <= 0) ::_exit(3);
    sent += static_cast<size_t>(n);
  }
}

using Body = std::function<std::string(const dist::Launch&)>;

[[noreturn]] inline void run(dist::Launch launch, const Body& body, int port_from, int result_to) {
  at::set_num_threads(1);  // the threads of the parent's pool are not here
  if (::read(port_from, &launch.port, sizeof launch.port) != sizeof launch.port) ::_exit(3);
  try {
    const std::string said = body(launch);
    send(result_to, ::testing::Test::HasFailure() ? 'f' : 's', said);
  } catch (const std::exception& error) {
    send(result_to, 'e', error.what());
  }
  ::_exit(0);  // nothing of the parent's is taken down here
}

/// All of a pipe until its writer is gone; false when that takes longer than until `deadline`.
inline bool read_all(int pipe, std::chrono::steady_clock::time_point deadline, std::string& text) {
  char buffer[4096];
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd wait{pipe, POLLIN, 0};
    if (left <= 0 || ::poll(&wait, 1, static_cast<int>(left)) <= 0) return false;
    const ssize_t n = ::read(pipe, buffer, sizeof buffer);
    if (n <= 0) return true;
    text.append(buffer, static_cast<size_t>(n));
  }
}

}  // namespace ranks

/// Processes that find each other as under torchrun: by a store that this process keeps.
class RunningRanks {
 public:
  /// Makes `size` processes for `body`, which wait for the start. Call it while this process has no other threads,
  /// those of a store included: a lock that one holds at that moment stays locked in the new process for ever.
  RunningRanks(int size, const ranks::Body& body);
  /// Lets them run, all at once.
  void start();
  /// Starts them if nobody has and waits for their end. One that does not end within `limit` is killed and fails the
  /// test, and so does a failed expectation in a rank; `straggler` is expected not to end, and is killed when the
  /// others have.
  std::vector<Ended> wait(int straggler = -1, std::chrono::seconds limit = std::chrono::seconds(200));

 private:
  struct Child {
    pid_t pid;
    int port_to, result_from;
  };
  Ended end_of(int rank, bool kill, std::chrono::steady_clock::time_point deadline);
  std::vector<Child> children_;
  c10::intrusive_ptr<c10d::TCPStore> store_;
};

inline RunningRanks::RunningRanks(int size, const ranks::Body& body) {
  for (int rank = 0; rank < size; ++rank) {
    int port[2], result[2];
    if (::pipe2(port, O_CLOEXEC) != 0 || ::pipe2(result, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(port[1]);
      for (const Child& other : children_) ::close(other.port_to);
      ranks::run({.rank = rank, .size = size, .local_rank = rank, .local_size = size, .address = "127.0.0.1"}, body,
                 port[0], result[1]);
    }
    ::close(port[0]);
    ::close(result[1]);
    children_.push_back({pid, port[1], result[0]});
  }
}

inline void RunningRanks::start() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const uint16_t port = store_->getPort();
  for (const Child& child : children_) {
    EXPECT_EQ(::write(child.port_to, &port, sizeof port), static_cast<ssize_t>(sizeof port));
    ::close(child.port_to);
  }
}

inline Ended RunningRanks::end_of(int rank, bool kill, std::chrono::steady_clock::time_point deadline) {
  const Child& child = children_[rank];
  if (kill) ::kill(child.pid, SIGKILL);
  std::string text;
  const bool in_time = ranks::read_all(child.result_from, deadline, text);
  EXPECT_TRUE(in_time) << "rank " << rank << " of " << children_.size() << " did not end";
  if (!in_time) ::kill(child.pid, SIGKILL);
  ::close(child.result_from);
  int status = 0;
  ::waitpid(child.pid, &status, 0);
  Ended how;
  how.killed = WIFSIGNALED(status);
  if (!text.empty()) (text[0] == 'e' ? how.error : how.said) = text.substr(1);
  EXPECT_FALSE(!text.empty() && text[0] == 'f') << "rank " << rank << " of " << children_.size() << " failed";
  return how;
}

inline std::vector<Ended> RunningRanks::wait(int straggler, std::chrono::seconds limit) {
  if (!store_) start();
  const auto deadline = std::chrono::steady_clock::now() + limit;
  std::vector<Ended> ended(children_.size());
  for (int rank = 0; rank < static_cast<int>(ended.size()); ++rank) {
    if (rank != straggler) ended[rank] = end_of(rank, /*kill=*/false, deadline);
  }
  if (straggler >= 0) ended[straggler] = end_of(straggler, /*kill=*/true, deadline);
  store_.reset();
  return ended;
}

/// Runs `body` in `size` processes and waits for their end.
inline std::vector<Ended> run_ranks(int size, const ranks::Body& body) { return RunningRanks(size, body).wait(); }

/// Expects that no rank threw or was killed.
inline void expect_all_fine(const std::vector<Ended>& ended) {
  for (size_t rank = 0; rank < ended.size(); ++rank) {
    EXPECT_EQ(ended[rank].error, "") << "rank " << rank << " of " << ended.size();
    EXPECT_FALSE(ended[rank].killed) << "rank " << rank << " of " << ended.size();
  }
}

}  // namespace fox::test
