#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "dist/liveness.h"

namespace fox::dist {

/// Looks after ranks that NCCL connects, in one group or several. On the GPU NCCL waits for ever for a rank that has
/// ended; the host goes on launching until CUDA's queue is full and then stands still inside CUDA, where it cannot look
/// around. So a thread looks every `patience` what Liveness sees, without a call of CUDA, which may stand still as
/// well. A fault that it finds is thrown by check(), which the host reaches once what every group has on its way has
/// been given up. One guard for all groups: none may still be trusted when another's exchanges have been given up.
class Guard {
 public:
  Guard(std::shared_ptr<Liveness> liveness, std::chrono::milliseconds patience);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// `give_up` ends what a group has on its way; a thread calls it when a fault is found. Throws one that was found.
  void add(std::function<void()> give_up);
  /// Throws the fault that was found.
  void check() const;

 private:
  void run();
  bool wait();

  const std::shared_ptr<Liveness> liveness_;
  const std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;
  std::condition_variable stopping_changed_;
  bool stopping_ = false;
  std::vector<std::function<void()>> give_up_;
  std::optional<Error> fault_;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace fox::dist
