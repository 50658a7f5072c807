// Whole runs on several ranks, as torchrun starts them: the same tokens, the same losses, one run directory; resumed on
// other numbers of ranks; killed, hanging, started with different configurations.

#include "train/ranks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <functional>

#include "base/error.h"
#include "checkpoint/safetensors.h"
#include "ops/device.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "train/run.h"
#include "train/small_run.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using test::Ended;
using test::expect_all_fine;
using test::RunningRanks;

RunConfig small_run(const fs::path& folder) {
  RunConfig config = test::small_run(folder);
  config.train.precision = "float64";  // so that the order of sums does not matter
  config.train.rank_timeout_s = 120;
  return config;
}

using OnStep = std::function<void(const dist::Launch&, const StepResult&)>;

RunningRanks start(const RunConfig& config, int ranks, const OnStep& on_step = {},
                   const std::function<void(RunConfig&, int rank)>& change = {}) {
  return {ranks, [=](const dist::Launch& launch) {
            std::freopen("/dev/null", "w", stderr);
            RunConfig own = config;
            if (change) change(own, launch.rank);
            RunOptions options;
            options.launch = launch;
            if (on_step) options.on_step = [&](const StepResult& result) { on_step(launch, result); };
            return std::string(run_training(own, options) == RunOutcome::kFinished ? "finished" : "not finished");
          }};
}

void run(const RunConfig& config, int ranks) {
  const auto ended = start(config, ranks).wait();
  expect_all_fine(ended);
  for (const auto& rank : ended) EXPECT_EQ(rank.said, "finished");
}

/// Runs until every rank throws after `step`, as if all were killed there.
void run_and_break_off(const RunConfig& config, int ranks, int64_t step) {
  const auto ended = start(config, ranks, [=](const dist::Launch&, const StepResult& result) {
                       if (result.step == step) throw Error("broken off");
                     }).wait();
  for (const auto& rank : ended) EXPECT_NE(rank.error.find("broken off"), std::string::npos) << rank.error;
}

/// All numbers of two runs' metrics, compared; which lines there are, and of which steps, is the same exactly, but for
/// what `without` names: ranks that hold contexts together do not look at "gates".
void expect_same_metrics(const RunConfig& a, const RunConfig& b, const std::string& without = "") {
  auto lines = test::metrics_of(a), others = test::metrics_of(b);
  for (auto* list : {&lines, &others}) {
    std::erase_if(*list, [&](const auto& line) { return line.at("kind") == without; });
  }
  ASSERT_EQ(lines.size(), others.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    const auto mine = lines[i].flatten(), theirs = others[i].flatten();
    ASSERT_EQ(mine.size(), theirs.size()) << lines[i].dump();
    for (const auto& [key, value] : mine.items()) {
      if (!value.is_number_float()) {
        EXPECT_EQ(value, theirs[key]) << lines[i].dump();
      } else {
        EXPECT_NEAR(value.get<double>(), theirs[key].get<double>(), 1e-9 * std::abs(value.get<double>()) + 1e-12)
            << key << " of " << lines[i].dump();
      }
    }
  }
}

void expect_same_weights(const RunConfig& a, const RunConfig& b) {
  for (const char* file : {"model.safetensors", "trainer.safetensors"}) {
    const auto newest = [&](const RunConfig& config) {
      return checkpoint::read_safetensors(checkpoint::newest_checkpoint(test::checkpoints_of(config))->dir / file)
          .tensors;
    };
    const auto mine = newest(a), others = newest(b);
    ASSERT_EQ(mine.size(), others.size());
    for (const auto& [name, tensor] : mine) {
      EXPECT_TRUE(at::allclose(tensor, others.at(name), 1e-8, 1e-12)) << file << ": " << name;
    }
  }
}

TEST(Ranks, TrainAsOneProcessDoes) {
  const test::TemporaryFolder folder;
  const RunConfig alone = small_run(folder.path() / "1");
  run(alone, 1);
  for (const int ranks : {2, 4}) {
    for (const bool shard : {false, true}) {
      RunConfig config = small_run(folder.path() / fmt::format("{}{}", ranks, shard));
      config.train.shard_optimizer = shard;
      run(config, ranks);
      expect_same_metrics(alone, config);
      expect_same_weights(alone, config);
    }
  }
}

// 40 steps in four pieces, each on another number of ranks and from a checkpoint in the middle of an epoch.
TEST(Ranks, GoOnOnOtherNumbersOfRanks) {
  const test::TemporaryFolder folder;
  const RunConfig alone = small_run(folder.path() / "alone"), config = small_run(folder.path() / "several");
  run(alone, 1);
  run_and_break_off(config, 2, 7);
  run_and_break_off(config, 4, 18);
  run_and_break_off(config, 1, 25);
  run(config, 2);
  expect_same_metrics(alone, config);
  expect_same_weights(alone, config);
}

// Contexts that ranks hold together: all of them, or two by two; and a run goes on from there on one that is alone.
TEST(Ranks, HoldContextsTogether) {
  const test::TemporaryFolder folder;
  const RunConfig alone = small_run(folder.path() / "1");
  run(alone, 1);
  for (const auto& [ranks, together] : {std::pair{2, 2}, {4, 2}, {4, 4}}) {
    RunConfig config = small_run(folder.path() / fmt::format("{}-{}", ranks, together));
    config.train.sequence_ranks = together;
    if (ranks != together) {
      run_and_break_off(config, ranks, 14);
      config.train.sequence_ranks = 1;
      run(config, 1);
    } else {
      run(config, ranks);
    }
    expect_same_metrics(alone, config, "gates");
    expect_same_weights(alone, config);
  }
}

// In float32, no further from float64 than twice what one process is.
TEST(Ranks, HoldContextsTogetherInFloat32) {
  const test::TemporaryFolder folder;
  const auto losses = [&](const char* precision, int ranks) {
    RunConfig config = small_run(folder.path() / fmt::format("{}-{}", precision, ranks));
    config.train.precision = precision;
    config.train.sequence_ranks = ranks;
    run(config, ranks);
    std::vector<double> losses;
    for (const json& line : test::metrics_of(config)) {
      if (line.at("kind") == "train") losses.push_back(line.at("loss"));
    }
    return losses;
  };
  const auto truth = losses("float64", 1), alone = losses("float32", 1), together = losses("float32", 2);
  ASSERT_EQ(truth.size(), 40);
  const auto worst = [&](const std::vector<double>& of) {
    double worst = 0;
    for (size_t i = 0; i < truth.size(); ++i) worst = std::max(worst, std::abs(of.at(i) / truth[i] - 1));
    return worst;
  };
  EXPECT_LT(worst(together), 2 * worst(alone) + 1e-6);
  std::printf("float32: losses within %.1e of float64 on 2 ranks, %.1e alone\n", worst(together), worst(alone));
}

// On the same number of ranks bit for bit, after the one that writes was killed and the other told so.
TEST(Ranks, AreToldOfOneThatWasKilledAndGoOnBitForBit) {
  const test::TemporaryFolder folder;
  const RunConfig whole = small_run(folder.path() / "whole"), config = small_run(folder.path() / "killed");
  run(whole, 2);
  const auto ended = start(config, 2, [](const dist::Launch& launch, const StepResult& result) {
                       if (launch.rank == 0 && result.step == 19) ::raise(SIGKILL);
                     }).wait();
  EXPECT_TRUE(ended[0].killed);
  EXPECT_NE(ended[1].error.find("rank 0 of 2 has ended or stands still"), std::string::npos) << ended[1].error;
  run(config, 2);
  EXPECT_EQ(test::final_state(config), test::final_state(whole));
  EXPECT_EQ(test::metrics_of(config), test::metrics_of(whole));
}

TEST(Ranks, EndWithinTheTimeoutWhenOneHangsOrFails) {
  const test::TemporaryFolder folder;
  RunConfig hanging = small_run(folder.path() / "hangs"), failing = small_run(folder.path() / "fails");
  hanging.train.rank_timeout_s = 15;
  auto hangs = start(hanging, 4, [](const dist::Launch& launch, const StepResult& result) {
    while (launch.rank == 2 && result.step == 5) ::pause();
  });
  auto fails = start(failing, 2, [](const dist::Launch& launch, const StepResult& result) {
    if (launch.rank == 0 && result.step == 5) throw Error("the disk is full");
  });
  hangs.start(), fails.start();
  const auto of_hanging = hangs.wait(/*straggler=*/2);
  for (const int rank : {0, 1, 3}) {
    EXPECT_NE(of_hanging[rank].error.find("rank 2 of 4 hangs"), std::string::npos) << of_hanging[rank].error;
    EXPECT_NE(of_hanging[rank].error.find("within 15 s"), std::string::npos) << of_hanging[rank].error;
  }
  EXPECT_EQ(fails.wait()[1].error, "rank 0 of 2 stopped: the disk is full");
}

TEST(Ranks, RefuseDifferentConfigurations) {
  const test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());
  const auto check = [&](const std::function<void(RunConfig&, int)>& change, const std::string& expected) {
    for (const auto& rank : start(config, 2, {}, change).wait()) EXPECT_EQ(rank.error, expected);
    EXPECT_FALSE(fs::exists(config.output.dir)) << "something was written";
  };
  check([](RunConfig& c, int rank) { c.train.lr = rank == 1 ? 0.002 : 0.001; },
        "rank 1 was started with another configuration than rank 0: train.lr is 0.001 on rank 0 and 0.002 on rank 1");
  check([](RunConfig& c, int rank) { c.model.num_heads = rank == 1 ? 4 : 2; },
        "rank 1 was started with another configuration than rank 0: model.num_heads is 2 on rank 0 and 4 on rank 1");
  check([](RunConfig& c, int rank) { c.output.keep_last = rank == 0 ? 1 : 2; },
        "rank 1 was started with another configuration than rank 0: output.keep_last is 1 on rank 0 and 2 on rank 1");
  // Its own affair.
  const auto ended = start(config, 2, {}, [](RunConfig& c, int rank) { c.train.threads = rank; }).wait();
  expect_all_fine(ended);
}

TEST(Ranks, RefuseOtherText) {
  const auto ended = test::run_ranks(4, [](const dist::Launch& launch) {
    const auto ranks = dist::ProcessGroup::join(launch, at::kCPU, std::chrono::seconds(120));
    check_same_on_all(ranks, "text", "all the same");
    check_same_on_all(ranks, "text", launch.rank == 2 ? "B" : "A");
    return "";
  });
  for (const auto& rank : ended) EXPECT_EQ(rank.error, "rank 2 has another text than rank 0: B, and rank 0 A");
}

TEST(Ranks, RefuseMoreRanksThanData) {
  const test::TemporaryFolder folder;
  const RunConfig config = small_run(folder.path());  // four contexts a step
  for (const int ranks : {3, 8}) {
    try {
      share_of_step(config, 0, ranks);
      FAIL() << ranks;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(fmt::format("{} ranks cannot share the 4 contexts of a step", ranks)),
                std::string::npos);
    }
  }
  for (const auto& rank : start(config, 3).wait())
    EXPECT_NE(rank.error.find("3 ranks cannot share"), std::string::npos);
}

TEST(Ranks, RefuseContextsThatCannotBeHeldTogether) {
  const test::TemporaryFolder folder;
  RunConfig config = small_run(folder.path());
  config.train.sequence_ranks = 3;
  const auto expect_refused = [&](int ranks, const std::string& expected) {
    try {
      share_of_step(config, 0, ranks);
      FAIL() << ranks;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(expected), std::string::npos) << error.what();
    }
  };
  expect_refused(1, "3 ranks are to hold a context together, and 1 was started");
  expect_refused(4, "3 ranks are to hold a context together, and 4 were started");
  expect_refused(9, "9 / 3 ranks cannot share the 4 contexts of a step");
  // Neighbours have the same share.
  config.train.sequence_ranks = 2;
  for (const int rank : {0, 1, 2, 3}) EXPECT_EQ(share_of_step(config, rank, 4).first, rank < 2 ? 0 : 2);
}

TEST(Ranks, RefuseOneGpuForAll) {
  const dist::Launch launch{.rank = 1, .size = 4, .local_rank = 1, .local_size = 2, .address = ""};
  std::string device = "cuda:0";
  EXPECT_THROW(choose_device(device, launch), UsageError);
  device = "cuda";
  choose_device(device, launch);
  EXPECT_EQ(device, "cuda:1");
}

TEST(Ranks, RefuseGpusThatAreNotThere) {
  try {
    ops::open_device("cuda");
    GTEST_SKIP() << "this machine has GPUs";
  } catch (const Error& expected) {
    const test::TemporaryFolder folder;
    RunConfig config = small_run(folder.path());
    config.train.device = "cuda";
    for (const auto& rank : start(config, 2).wait()) {
      EXPECT_NE(rank.error.find("no CUDA"), std::string::npos) << rank.error;
    }
  }
}

// Every context of a step is read once, in order, however it is shared.
TEST(StepShare, CoversEachStepOnce) {
  RunConfig config;
  config.data.context = 16;
  for (const int64_t contexts : {1, 4, 6, 12}) {
    for (const int64_t micro : {1, 2, 3, 12}) {
      config.train.batch_tokens = 16 * contexts;
      config.train.micro_batch_tokens = 16 * std::min(micro, contexts);
      for (int ranks = 1; ranks <= contexts; ++ranks) {
        if (contexts % ranks != 0) continue;
        std::vector<int64_t> read;
        for (int64_t step = 0; step < 3; ++step) {
          for (int rank = 0; rank < ranks; ++rank) {
            const StepShare share = share_of_step(config, rank, ranks);
            for (int64_t i = 0; i < share.micro_batches; ++i) {
              const auto rows = share.rows(step * share.micro_batches + i);
              EXPECT_GT(rows.count, 0);
              EXPECT_LE(rows.count, micro);
              for (int64_t row = 0; row < rows.count; ++row) read.push_back(rows.begin + row);
            }
          }
        }
        ASSERT_EQ(std::ssize(read), 3 * contexts);
        for (int64_t i = 0; i < 3 * contexts; ++i) EXPECT_EQ(read[i], i);
      }
    }
  }
}

}  // namespace
}  // namespace fox::train
