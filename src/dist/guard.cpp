#include "dist/guard.h"

#include <exception>
#include <future>
#include <utility>

namespace fox::dist {

Guard::Guard(std::shared_ptr<Liveness> liveness, std::chrono::milliseconds patience)
    : liveness_(std::move(liveness)), patience_(patience), thread_([this] { run(); }) {}

Guard::~Guard() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopping_changed_.notify_all();
  thread_.join();
}

void Guard::add(std::function<void()> give_up) {
  const std::lock_guard lock(mutex_);
  if (fault_) throw Error(*fault_);
  give_up_.push_back(std::move(give_up));
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
  } catch (const std::exception&) {
    // The store is gone, with the process that kept it: diagnose() says so.
  }
  const Error fault = liveness_->diagnose("NCCL waits for it");
  std::vector<std::function<void()>> give_up;
  {
    const std::lock_guard lock(mutex_);
    fault_ = fault;
    give_up.swap(give_up_);
  }
  // Side by side: what a group has on its way may stand behind another's on the GPU.
  std::vector<std::future<void>> ends;
  for (auto& group : give_up) ends.push_back(std::async(std::launch::async, std::move(group)));
  for (auto& end : ends) {
    try {
      end.get();
    } catch (const std::exception&) {
      // What could not be ended ends with the process; whoever gets to check() has the reason.
    }
  }
}

}  // namespace fox::dist
