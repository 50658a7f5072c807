#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace fox {

/// Threads that do one piece of work after another, in the order in which it was handed in.
class WorkerPool {
 public:
  /// `threads` of them; 0: one a core.
  explicit WorkerPool(int64_t threads);
  /// Work that no thread has begun is dropped.
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int64_t threads() const { return static_cast<int64_t>(threads_.size()); }
  /// What `work` returns or throws comes out of the future.
  template <typename Work>
  auto submit(Work work) -> std::future<decltype(work())> {
    auto task = std::make_shared<std::packaged_task<decltype(work())()>>(std::move(work));
    auto result = task->get_future();
    put([task] { (*task)(); });
    return result;
  }

 private:
  void put(std::function<void()> work);
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace fox
