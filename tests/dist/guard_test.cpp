// What a thread finds out while the host stands still within CUDA, without GPUs.
#include "dist/guard.h"

#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace fox::dist {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLong{120000}, kPatience{100};

struct Ranks {
  explicit Ranks(milliseconds timeout)
      : first(std::make_shared<Liveness>(store, 0, 2, timeout, false)),
        second(std::make_unique<Liveness>(store, 1, 2, timeout, false)) {}
  StorePointer store = c10::make_intrusive<c10d::HashStore>();
  std::shared_ptr<Liveness> first;
  std::unique_ptr<Liveness> second;
};

/// What check() throws once `given_up`; "" when nothing has been given up within the time.
std::string fault_of(const Guard& guard, const std::atomic<int>& given_up, milliseconds within) {
  const auto deadline = std::chrono::steady_clock::now() + within;
  while (given_up == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(milliseconds(10));
  try {
    guard.check();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Guard, NamesTheRankThatEnded) {
  Ranks ranks(kLong);
  ranks.second.reset();
  ranks.store->set("sign/1", std::string("7 3"));  // the last that a process wrote before it was killed
  std::atomic<int> given_up{0};
  Guard guard(ranks.first, kPatience);
  guard.add([&] { ++given_up; });
  EXPECT_EQ(fault_of(guard, given_up, kLong), "rank 1 of 2 has ended or stands still: no sign of life for 10 s");
  EXPECT_EQ(given_up, 1);
}

TEST(Guard, NamesTheRankThatHangsAfterTheTimeout) {
  Ranks ranks(milliseconds(1500));
  ranks.first->entered();
  std::atomic<int> given_up{0};
  Guard guard(ranks.first, kPatience);
  guard.add([&] { ++given_up; });
  const std::string fault = fault_of(guard, given_up, kLong);
  EXPECT_EQ(fault, "rank 1 of 2 hangs: others wait for it in exchange 1, it has not come beyond 0 within 1.5 s");
}

TEST(Guard, TellsWhatARankReportedAlsoWhenItCannotBeGivenUp) {
  Ranks ranks(kLong);
  ranks.second->report("rank 1 of 2 stopped: the disk is full");
  std::atomic<int> given_up{0};
  Guard guard(ranks.first, kPatience);
  guard.add([&] {
    ++given_up;
    throw std::runtime_error("no");
  });
  EXPECT_EQ(fault_of(guard, given_up, kLong), "rank 1 of 2 stopped: the disk is full");
}

// A group's exchanges may stand behind another's, so none is given up after the other.
TEST(Guard, GivesUpAllGroupsSideBySide) {
  Ranks ranks(kLong);
  std::atomic<int> begun{0}, given_up{0};
  Guard guard(ranks.first, kPatience);
  for (int group = 0; group < 2; ++group) {
    guard.add([&] {
      for (++begun; begun < 2;) std::this_thread::sleep_for(milliseconds(1));
      ++given_up;
    });
  }
  ranks.second->report("rank 1 of 2 stopped: the disk is full");
  EXPECT_EQ(fault_of(guard, given_up, kLong), "rank 1 of 2 stopped: the disk is full");
  EXPECT_THROW(guard.add([] {}), Error);  // a group that comes too late
}

TEST(Guard, TellsThatTheStoreIsGone) {
  struct Store : c10d::HashStore {
    std::atomic<bool> gone{false};
    bool check(const std::vector<std::string>& keys) override {
      if (gone) throw std::runtime_error("connection reset");
      return c10d::HashStore::check(keys);
    }
  };
  const auto store = c10::make_intrusive<Store>();
  std::atomic<int> given_up{0};
  Guard guard(std::make_shared<Liveness>(store, 1, 2, kLong, false), kPatience);
  guard.add([&] { ++given_up; });
  store->gone = true;
  EXPECT_EQ(fault_of(guard, given_up, kLong),
            "the store of 2 ranks is gone: rank 0 or torchrun, which kept it, has ended");
}

TEST(Guard, LeavesAloneRanksThatAreBusyWithoutAnExchange) {
  Ranks ranks(milliseconds(500));
  for (Liveness* rank : {ranks.first.get(), ranks.second.get()}) rank->entered();
  for (const char* sign : {"sign/0", "sign/1"}) {  // say so half a second later, or when the machine has time for it
    while (!ranks.store->get_to_str(sign).ends_with(" 1")) std::this_thread::sleep_for(milliseconds(10));
  }
  std::atomic<int> given_up{0};
  Guard guard(ranks.first, kPatience);
  guard.add([&] { ++given_up; });
  EXPECT_EQ(fault_of(guard, given_up, milliseconds(2500)), "");
  EXPECT_EQ(given_up, 0);
}

}  // namespace
}  // namespace fox::dist
