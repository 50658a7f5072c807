#include "train/prefetch.h"

#include <chrono>
#include <utility>

namespace fox::train {

Prefetcher::Prefetcher(Source source, int64_t first, int64_t ahead, bool pinned)
    : source_(std::move(source)), ahead_(ahead), pinned_(pinned), thread_([this, first] { work(first); }) {}

Prefetcher::~Prefetcher() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Prefetcher::work(int64_t index) {
  try {
    for (;; ++index) {
      data::Batch batch = source_(index);
      if (pinned_) batch = {batch.ids_BT.pin_memory(), batch.labels_BT.pin_memory()};
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || std::ssize(ready_) < ahead_; });
      if (stopping_) return;
      ready_.push_back(std::move(batch));
      changed_.notify_all();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

data::Batch Prefetcher::next() {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return error_ || !ready_.empty(); });
  waited_ += std::chrono::duration<double>(Clock::now() - start).count();
  if (ready_.empty()) std::rethrow_exception(error_);
  data::Batch batch = std::move(ready_.front());
  ready_.pop_front();
  changed_.notify_all();
  return batch;
}

}  // namespace fox::train
