#include "dist/process_group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "base/error.h"
#include "support/ranks.h"

namespace fox::dist {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::expect_all_fine;
using test::run_ranks;
using test::RunningRanks;

constexpr seconds kLong{120};  // a busy machine is no fault
constexpr seconds kShort{15};

/// What a rank that is asked for its number alone would have: different on each, all of it exact in float32.
at::Tensor own(int rank, int64_t n) { return at::arange(n, at::kFloat) * (rank + 1) + 100 * rank; }

at::Tensor sum(int size, int64_t n) {
  auto all = at::zeros({n}, at::kFloat);
  for (int rank = 0; rank < size; ++rank) all += own(rank, n);
  return all;
}

void collectives(const ProcessGroup& group) {
  const int rank = group.rank(), size = group.size();
  for (const int64_t n : {1, 7, 1000}) {
    auto tensor = own(rank, n);
    group.all_reduce(tensor).wait();
    EXPECT_TRUE(at::equal(tensor, sum(size, n)));

    for (int root = 0; root < size; ++root) {
      tensor = own(rank, n);
      group.broadcast(tensor, root).wait();
      EXPECT_TRUE(at::equal(tensor, own(root, n)));
    }

    const auto all = at::empty({size * n}, at::kFloat), part = own(rank, n);
    group.all_gather(all, part).wait();
    for (int other = 0; other < size; ++other) EXPECT_TRUE(at::equal(all.narrow(0, other * n, n), own(other, n)));

    const auto sums = own(rank, size * n), scattered = at::empty({n}, at::kFloat);
    group.reduce_scatter(scattered, sums).wait();
    EXPECT_TRUE(at::equal(scattered, sum(size, size * n).narrow(0, rank * n, n)));
  }
}

void collectives_in_place(const ProcessGroup& group) {
  const int rank = group.rank(), size = group.size();
  const int64_t n = 33;
  const auto all = own(rank, size * n), place = all.narrow(0, rank * n, n);
  group.reduce_scatter(place, all).wait();
  EXPECT_TRUE(at::equal(place, sum(size, size * n).narrow(0, rank * n, n)));
  group.all_gather(all, place).wait();
  EXPECT_TRUE(at::equal(all, sum(size, size * n)));
}

/// Tensors of several sizes and dtypes travel once round the ring, two rounds on their way at a time.
void ring(const ProcessGroup& group) {
  const int rank = group.rank(), size = group.size();
  const int next = (rank + 1) % size, previous = (rank + size - 1) % size;
  const auto of = [](int rank) {
    return std::vector<at::Tensor>{own(rank, 5), own(rank, 300).to(at::kBFloat16), at::full({2}, rank, at::kLong)};
  };
  std::vector<at::Tensor> held = of(rank), also_held = {own(rank, 9)};
  for (int step = 1; step < size; ++step) {
    std::vector<at::Tensor> come, also_come;
    for (const auto& tensor : held) come.push_back(at::empty_like(tensor));
    for (const auto& tensor : also_held) also_come.push_back(at::empty_like(tensor));
    auto first = group.exchange(held, next, come, previous);
    auto second = group.exchange(also_held, next, also_come, previous);
    second.wait();
    first.wait();
    held = come;
    also_held = also_come;
    const int from = (rank - step + size) % size;
    for (size_t i = 0; i < held.size(); ++i) EXPECT_TRUE(at::equal(held[i], of(from)[i])) << step << " " << i;
    EXPECT_TRUE(at::equal(also_held[0], own(from, 9)));
  }
}

class Ranks : public ::testing::TestWithParam<int> {};

TEST_P(Ranks, ExchangeTensors) {
  expect_all_fine(run_ranks(GetParam(), [](const Launch& launch) {
    const auto group = ProcessGroup::join(launch, at::kCPU, kLong);
    EXPECT_EQ(group.rank(), launch.rank);
    EXPECT_EQ(group.size(), launch.size);
    EXPECT_EQ(group.backend(), launch.size == 1 ? "none" : "gloo");
    collectives(group);
    collectives_in_place(group);
    ring(group);
    group.barrier();
    return "";
  }));
}

TEST_P(Ranks, TellTexts) {
  expect_all_fine(run_ranks(GetParam(), [](const Launch& launch) {
    const auto group = ProcessGroup::join(launch, at::kCPU, kLong);
    for (const char* prefix : {"a", "b"}) {
      const auto texts = group.gather_texts(prefix + std::to_string(group.rank()));
      for (int rank = 0; rank < group.size(); ++rank) EXPECT_EQ(texts.at(rank), prefix + std::to_string(rank));
    }
    group.barrier();
    return "";
  }));
}

INSTANTIATE_TEST_SUITE_P(Counts, Ranks, ::testing::Values(1, 2, 4));

// Four ranks as two rows and two columns, both used at once.
TEST(ProcessGroup, SplitsIntoAMesh) {
  expect_all_fine(run_ranks(4, [](const Launch& launch) {
    const auto world = ProcessGroup::join(launch, at::kCPU, kLong);
    const auto row = world.split(world.rank() / 2, world.rank());
    const auto column = world.split(world.rank() % 2, -world.rank());  // in falling order
    EXPECT_EQ(row.rank(), world.rank() % 2);
    EXPECT_EQ(column.rank(), 1 - world.rank() / 2);
    for (const auto& group : {row, column}) {
      EXPECT_EQ(group.size(), 2);
      collectives(group);
      ring(group);
    }
    const auto in_row = row.gather_texts(std::to_string(world.rank()));
    EXPECT_EQ(in_row, world.rank() < 2 ? (std::vector<std::string>{"0", "1"}) : (std::vector<std::string>{"2", "3"}));
    EXPECT_EQ(world.split(world.rank(), 0).size(), 1);
    collectives(world);
    world.barrier();
    return "";
  }));
}

/// Every rank but `culprit` must end by an error that names it.
void expect_blamed(const std::vector<test::Ended>& ended, int culprit, const std::string& how) {
  for (int rank = 0; rank < static_cast<int>(ended.size()); ++rank) {
    if (rank == culprit) continue;
    EXPECT_NE(ended[rank].error.find("rank " + std::to_string(culprit)), std::string::npos)
        << "rank " << rank << " says '" << ended[rank].error << "'";
    EXPECT_NE(ended[rank].error.find(how), std::string::npos)
        << "rank " << rank << " says '" << ended[rank].error << "'";
  }
}

// All at once, as each waits for seconds and computes nothing.
TEST(Faults, EndTheOthersByAnErrorThatNamesTheRank) {
  const auto joined = [](const Launch& launch, milliseconds timeout) {
    auto group = ProcessGroup::join(launch, at::kCPU, timeout);
    group.barrier();
    return group;
  };
  const auto killed = [&](int culprit) {
    return [=](const Launch& launch) {
      const auto group = joined(launch, kLong);
      if (launch.rank == culprit) ::raise(SIGKILL);
      for (;;) group.barrier();
      return "";
    };
  };
  const auto waits = [&](const std::function<void()>& culprit_does) {
    return [=](const Launch& launch) {
      const auto group = joined(launch, kShort);
      if (launch.rank == 1) culprit_does();
      group.all_reduce(at::ones({10})).wait();
      return "";
    };
  };
  RunningRanks one_killed(2, killed(1)), first_killed(4, killed(0)), hangs(4, waits([] { ::pause(); }));
  RunningRanks stopped(2, waits([] { ::raise(SIGSTOP); })), leaves(2, waits([] { throw Error("nobody is told"); }));
  RunningRanks says_why(4, [&](const Launch& launch) {
    const auto group = joined(launch, kLong);
    if (launch.rank == 3) {
      group.report_failure("the disk is full");
      throw Error("the disk is full");
    }
    for (;;) group.barrier();
    return "";
  });
  RunningRanks alone(2, [&](const Launch& launch) {
    const auto group = joined(launch, kShort);
    group.first_alone([] { ::raise(SIGKILL); });
    return "";
  });
  // Rank 0 is done, and no one's fault.
  RunningRanks in_part(3, [&](const Launch& launch) {
    const auto world = joined(launch, kLong);
    const auto group = world.split(launch.rank > 0 ? 1 : 0, launch.rank);
    if (launch.rank == 2) ::raise(SIGKILL);
    for (; launch.rank == 1;) group.barrier();
    return "";
  });
  RunningRanks does_not_come(3, [](const Launch& launch) {
    if (launch.rank != 1) ProcessGroup::join(launch, at::kCPU, kShort);
    return "";
  });

  // And no fault: rank 0 is waited for as long as it lives, whatever the timeout.
  RunningRanks patient(2, [&](const Launch& launch) {
    const auto group = joined(launch, kShort);
    bool did = false;
    group.first_alone([&] {
      std::this_thread::sleep_for(kShort + seconds(2));
      did = true;
    });
    EXPECT_EQ(did, group.rank() == 0);
    group.barrier();
    return "";
  });

  for (auto* ranks :
       {&one_killed, &first_killed, &hangs, &stopped, &leaves, &says_why, &alone, &in_part, &does_not_come, &patient}) {
    ranks->start();
  }

  expect_blamed(one_killed.wait(), 1, "has ended or stands still");
  expect_blamed(first_killed.wait(), 0, "has ended or stands still");
  expect_blamed(hangs.wait(1), 1, "hangs");
  expect_blamed(stopped.wait(1), 1, "has ended or stands still");
  expect_blamed(leaves.wait(), 1, "has ended");
  const auto told = says_why.wait();
  EXPECT_EQ(told[3].error, "the disk is full");
  expect_blamed(told, 3, "the disk is full");
  expect_blamed(alone.wait(), 0, "has ended or stands still");
  const auto part = in_part.wait();
  EXPECT_NE(part[1].error.find("rank 2 of 3 has ended"), std::string::npos) << part[1].error;
  const auto absent = does_not_come.wait();
  for (const int rank : {0, 2}) EXPECT_EQ(absent[rank].error, "rank 1 of 3 did not come within 15 s");
  expect_all_fine(patient.wait());
}

TEST(ProcessGroup, NamesTheStoreThatIsNotThere) {
  const Launch launch{.rank = 1, .size = 2, .local_rank = 1, .address = "127.0.0.1", .port = 1};
  try {
    ProcessGroup::join(launch, at::kCPU, seconds(1));
    FAIL() << "joined nobody";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "rank 1 of 2 cannot reach the store at 127.0.0.1:1");
  }
}

TEST(ProcessGroup, NeedsGpusForNccl) {
  const auto ended = run_ranks(2, [](const Launch& launch) {
    ProcessGroup::join(launch, at::Device(at::kCUDA, 0), kLong);
    return "";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.error, "NCCL needs GPUs, and no GPU is open");
}

TEST(Launch, ReadsWhatTorchrunSays) {
  const auto set = [](const char* name, const char* value) { value ? ::setenv(name, value, 1) : ::unsetenv(name); };
  set("WORLD_SIZE", nullptr);
  EXPECT_FALSE(read_launch().has_value());
  set("WORLD_SIZE", "4");
  EXPECT_THROW(read_launch(), UsageError);
  set("RANK", "0");
  set("LOCAL_RANK", "0");
  set("MASTER_ADDR", "here");
  set("MASTER_PORT", "29500");
  set("TORCHELASTIC_USE_AGENT_STORE", nullptr);
  set("TORCHELASTIC_RESTART_COUNT", nullptr);
  EXPECT_TRUE(read_launch()->hosts_store);
  set("TORCHELASTIC_USE_AGENT_STORE", "True");
  set("TORCHELASTIC_RESTART_COUNT", "2");
  const auto launch = read_launch();
  EXPECT_EQ(launch->size, 4);
  EXPECT_EQ(launch->port, 29500);
  EXPECT_EQ(launch->address, "here");
  EXPECT_EQ(launch->attempt, "2");
  EXPECT_FALSE(launch->hosts_store);
  for (const auto& [name, bad] : {std::pair{"RANK", "4"}, {"RANK", "-1"}, {"MASTER_PORT", "no"}, {"WORLD_SIZE", ""}}) {
    const std::string before = std::getenv(name);
    set(name, bad);
    EXPECT_THROW(read_launch(), UsageError) << name;
    set(name, before.c_str());
  }
}

}  // namespace
}  // namespace fox::dist
