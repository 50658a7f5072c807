#include "dist/guard.h"

#include <exception>
#include <utility>

namespace fox::dist {

Guard::Guard(std::shared_ptr<Liveness> liveness, std::chrono::milliseconds patience, std::function<void()> give_up)
    : liveness_(std::move(liveness)), patience_(patience), give_up_(std::move(give_up)), thread_([this] { run(); }) {}

Guard::~Guard() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopping_changed_.notify_all();
  thread_.join();
}

void Guard::check() const {
  const std::lock_guard lock(mutex_);
  if (fault_) throw Error(*fault_);
}

/// Whether the guard goes on.
bool Guard::wait() {
  std::unique_lock lock(mutex_);
  return !stopping_changed_.wait_for(lock, patience_, [this] { return stopping_; });
}

void Guard::run() {
  try {
    do {
      if (!wait()) return;
    } while (!liveness_->sees_fault());
    const Error fault = liveness_->diagnose("NCCL waits for it");
    const std::lock_guard lock(mutex_);
    fault_ = fault;
  } catch (const std::exception&) {
    return;  // the store is gone, with the process that kept it, and torchrun ends the others
  }
  try {
    give_up_();
  } catch (const std::exception&) {
    // What could not be ended ends with the process; whoever gets to check() has the reason.
  }
}

}  // namespace fox::dist
