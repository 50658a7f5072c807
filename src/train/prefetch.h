#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "data/batch_stream.h"

namespace fox::train {

/// Batches in order, made ahead of their use by a thread of its own; on their way to a GPU they lie in pinned memory,
/// from where they are copied while it computes.
class Prefetcher {
 public:
  /// Batch number `index`; called by the thread, one call after another.
  using Source = std::function<data::Batch(int64_t index)>;

  /// Begins with batch `first`; makes at most `ahead` that nobody has taken.
  Prefetcher(Source source, int64_t first, int64_t ahead, bool pinned);
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  /// The next batch. Throws what the source threw.
  data::Batch next();
  /// Seconds that next() has waited so far.
  double waited() const { return waited_; }

 private:
  void work(int64_t index);

  Source source_;
  int64_t ahead_;
  bool pinned_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<data::Batch> ready_;
  std::exception_ptr error_;
  bool stopping_ = false;
  double waited_ = 0;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace fox::train
