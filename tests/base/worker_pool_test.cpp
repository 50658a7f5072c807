#include "base/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>

namespace fox {
namespace {

TEST(WorkerPool, ResultsAndErrorsComeOutOfTheirFutures) {
  for (const int64_t threads : {1, 2, 5}) {
    WorkerPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    std::vector<std::future<int>> results;
    for (int i = 0; i < 1000; ++i) {
      results.push_back(pool.submit([i] {
        if (i % 100 == 7) throw std::runtime_error("seven");
        return i * i;
      }));
    }
    for (int i = 0; i < 1000; ++i) {
      if (i % 100 == 7) {
        EXPECT_THROW(results[i].get(), std::runtime_error);
      } else {
        EXPECT_EQ(results[i].get(), i * i);
      }
    }
  }
  EXPECT_GE(WorkerPool(0).threads(), 1);
}

TEST(WorkerPool, EndsWithWorkLeftOver) {
  std::atomic<int> done = 0;
  {
    WorkerPool pool(2);
    for (int i = 0; i < 100; ++i) {
      pool.submit([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        ++done;
      });
    }
  }
  EXPECT_LE(done, 100);
}

}  // namespace
}  // namespace fox
