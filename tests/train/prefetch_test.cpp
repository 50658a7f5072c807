#include "train/prefetch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/error.h"

namespace fox::train {
namespace {

data::Batch numbered(int64_t index) {
  return {at::full({1, 2}, index, at::kLong), at::full({1, 2}, index + 1, at::kLong)};
}

TEST(Prefetcher, HandsOverEveryBatchInOrderFromWhereItBegins) {
  Prefetcher batches(numbered, 7, 3, /*pinned=*/false);
  for (int64_t i = 7; i < 40; ++i) {
    const auto batch = batches.next();
    EXPECT_EQ(batch.ids_BT[0][0].item<int64_t>(), i);
    EXPECT_EQ(batch.labels_BT[0][1].item<int64_t>(), i + 1);
  }
}

TEST(Prefetcher, MakesNoMoreThanWasAskedFor) {
  std::atomic<int64_t> made = 0;
  Prefetcher batches(
      [&](int64_t index) {
        ++made;
        return numbered(index);
      },
      0, 2, false);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_LE(made, 3);  // two that wait, one in the hand
  batches.next();
}

TEST(Prefetcher, WhatTheSourceThrowsComesAfterTheGoodBatches) {
  Prefetcher batches(
      [](int64_t index) {
        if (index == 2) throw Error("the disk is gone");
        return numbered(index);
      },
      0, 4, false);
  batches.next();
  batches.next();
  EXPECT_THROW(batches.next(), Error);
  EXPECT_THROW(batches.next(), Error);
}

TEST(Prefetcher, MayEndWhileItWaits) {
  for (int i = 0; i < 20; ++i) Prefetcher batches(numbered, 0, 1, false);
}

}  // namespace
}  // namespace fox::train
