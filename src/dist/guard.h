#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "dist/liveness.h"

namespace fox::dist {

/// Looks after ranks that NCCL connects. On the GPU NCCL waits for ever for a rank that has ended; the host goes on
/// launching until CUDA's queue is full and then stands still inside CUDA, where it cannot look around. So a thread
/// looks every `patience` what Liveness sees, without a call of CUDA, which may stand still as well. A fault that it
/// finds is thrown by check(), which the host reaches once `give_up` has ended what is on its way.
class Guard {
 public:
  Guard(std::shared_ptr<Liveness> liveness, std::chrono::milliseconds patience, std::function<void()> give_up);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Throws the fault that was found.
  void check() const;

 private:
  void run();
  bool wait();

  const std::shared_ptr<Liveness> liveness_;
  const std::chrono::milliseconds patience_;
  const std::function<void()> give_up_;
  mutable std::mutex mutex_;
  std::condition_variable stopping_changed_;
  bool stopping_ = false;
  std::optional<Error> fault_;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace fox::dist
