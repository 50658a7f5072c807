#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "dist/backend.h"

namespace fox::dist {

/// What ranks know of one another beside the collectives. A thread of each writes down a few times a second, in the
/// store, that its process lives and how many collectives it has entered. When a collective fails, that tells a process
/// that has ended or stands still (no sign of life) from one that never came to the collective (the fewest entered).
class Liveness {
 public:
  /// `store` is used by the thread too: a connection of its own. `waits_for_readers`: the store goes when this process
  /// does, so report() waits until the others have read it.
  Liveness(StorePointer store, int rank, int size, std::chrono::milliseconds timeout, bool waits_for_readers);
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  int size() const { return size_; }
  /// This rank is about to enter another collective.
  void entered() { ++entered_; }
  /// The reason why this rank ends; the first that any rank gives stands.
  void report(const std::string& why) noexcept;
  /// The error to throw when a collective has failed with `cause`: the reason reported, else the rank found at fault
  /// (which is then reported). Takes some seconds.
  Error diagnose(const std::string& cause);
  /// For a thread that looks on, again and again: whether a rank shows no sign of life, which is then reported,
  /// something was reported, or ranks have stood still at different collectives for the timeout. Takes half a second
  /// when all is well, else up to 10 s.
  bool sees_fault();
  /// Waits, as long as `rank` shows signs of life, until `key` is in `store`. Throws what has been reported, and what
  /// diagnose() says when there is no sign of life within the timeout.
  void wait_for(c10d::Store& store, const std::string& key, int rank);

 private:
  struct Sign {
    int64_t beats = -1, entered = -1;
  };
  void beat();
  Sign sign_of(int rank) const;
  std::string reported() const;
  /// The signs of all ranks, having watched them until each has beaten once more or the time for that is over.
  struct Watched {
    std::vector<Sign> signs;
    std::string found;  ///< what was reported meanwhile, or who is silent; else ""
  };
  Watched watch() const;
  std::string find_culprit() const;

  StorePointer store_;
  const int rank_, size_;
  const std::chrono::milliseconds timeout_;
  const bool waits_for_readers_;
  std::atomic<int64_t> entered_{0};
  // What sees_fault() has seen: how many collectives each rank had entered, and since when.
  std::vector<int64_t> seen_entered_;
  std::chrono::steady_clock::time_point seen_since_;
  std::mutex mutex_;
  std::condition_variable stopping_changed_;
  bool stopping_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace fox::dist
