// What NCCL's ranks find out by themselves about one that has ended, since NCCL tells nobody.
#include "dist/liveness.h"

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace fox::dist {
namespace {

constexpr std::chrono::seconds kTimeout{120};

TEST(Liveness, SeesNoFaultWhileAllLive) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Liveness first(store, 0, 2, kTimeout, false), second(store, 1, 2, kTimeout, false);
  EXPECT_FALSE(first.sees_fault());
  EXPECT_FALSE(second.sees_fault());
}

TEST(Liveness, SeesWhoHasStoppedToBeat) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Liveness first(store, 0, 3, kTimeout, false), third(store, 2, 3, kTimeout, false);
  store->set("sign/1", {'7', ' ', '3'});  // the last that a process wrote before it was killed
  EXPECT_TRUE(first.sees_fault());
  for (Liveness* rank : {&first, &third}) {
    EXPECT_TRUE(rank->sees_fault());  // the others read the first one's finding
    const Error error = rank->diagnose("NCCL waited");
    EXPECT_STREQ(error.what(), "rank 1 of 3 has ended or stands still: no sign of life for 10 s");
  }
}

TEST(Liveness, SeesWhatARankHasReported) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Liveness first(store, 0, 2, kTimeout, false), second(store, 1, 2, kTimeout, false);
  second.report("rank 1 of 2 stopped: the disk is full");
  EXPECT_TRUE(first.sees_fault());
  EXPECT_STREQ(first.diagnose("NCCL waited").what(), "rank 1 of 2 stopped: the disk is full");
}

/// A rank answers, and reports that it stops, between two looks of the one that waits for it.
class AnswersBetweenLooks : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    const bool found = HashStore::check(keys);
    if (keys.front() != "answer" || found) return found;
    HashStore::set("answer", {'y'});
    HashStore::set("reason", {'n', 'o'});
    return false;
  }
};

TEST(Liveness, TakesAnAnswerThatWasGivenBeforeItsRankStopped) {
  const auto store = c10::make_intrusive<AnswersBetweenLooks>();
  Liveness first(store, 0, 2, kTimeout, false), second(store, 1, 2, kTimeout, false);
  EXPECT_NO_THROW(first.wait_for(*store, "answer", 1));
  EXPECT_THROW(first.wait_for(*store, "another answer", 1), Error);
}

}  // namespace
}  // namespace fox::dist
