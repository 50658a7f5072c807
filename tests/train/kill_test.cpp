// A run is killed again and again (SIGKILL, which no process can catch), spread evenly over its length, many times in
// the middle of writing a checkpoint. Each time it must find a whole checkpoint and go on; in the end it must have the
// bits of a run that was left alone. FOX_KILLS=50 build/kill_test is the full count; the default fits a test suite.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "support/temporary_folder.h"
#include "train/run.h"
#include "train/small_run.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

enum class Moment {
  kStep,       // some time after a step
  kWriting,    // some time after the beginning of a checkpoint
  kWrittenTo,  // at a given stage of a checkpoint, the process held there
};

struct Kill {
  Moment moment;
  int64_t step;                        // at this step or the first such moment after it
  std::string stage;                   // kWrittenTo
  std::chrono::microseconds delay{0};  // kStep, kWriting: how long after
};

// The process that trains. It tells `pipe` when the moment has come.
[[noreturn]] void train_in_child(const RunConfig& config, const Kill& kill, int pipe) {
  std::freopen("/dev/null", "w", stderr);
  // Steps and checkpoints are done by two threads.
  std::atomic<bool> told = false;
  const auto tell = [&](bool hold) {
    if (told.exchange(true)) return;
    if (::write(pipe, "!", 1) != 1) ::_exit(3);
    while (hold) ::pause();
  };
  std::atomic<int64_t> step = 0;
  RunOptions options;
  options.on_step = [&](const StepResult& result) {
    step = result.step;
    if (kill.moment == Moment::kStep && step >= kill.step) tell(false);
    // Training goes on while a checkpoint is written; it must not come to its end before it is killed.
    while (told && result.tokens == config.train.max_tokens) ::pause();
  };
  options.on_checkpoint_stage = [&](std::string_view stage) {
    if (step < kill.step) return;
    if (kill.moment == Moment::kWriting && stage == "begin") tell(false);
    if (kill.moment == Moment::kWrittenTo && stage == kill.stage) tell(true);
  };
  try {
    run_training(config, options);
  } catch (const std::exception& error) {
    ::_exit(2);
  }
  ::_exit(0);
}

// Starts or continues the run and kills it; true when it was killed and did not end by itself.
bool run_and_kill(const RunConfig& config, const Kill& kill) {
  int pipe[2];
  if (::pipe(pipe) != 0) return false;
  const pid_t child = ::fork();
  if (child == 0) train_in_child(config, kill, pipe[1]);
  ::close(pipe[1]);
  char byte = 0;
  const bool came = ::read(pipe[0], &byte, 1) == 1;
  if (came) {
    std::this_thread::sleep_for(kill.delay);
    ::kill(child, SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ::close(pipe[0]);
  EXPECT_TRUE(came) << "the run ended (status " << status << ") before step " << kill.step;
  return WIFSIGNALED(status);
}

// Trains in a process of its own, to the end; returns how long a checkpoint takes. This process never trains itself, so
// that its children do not inherit torch's threads.
std::chrono::microseconds run_to_the_end(const RunConfig& config) {
  const auto folder = fs::path(config.output.dir).parent_path() / "seconds";
  const pid_t child = ::fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    Clock::time_point begin;
    std::vector<std::chrono::microseconds> took;
    RunOptions options;
    options.on_checkpoint_stage = [&](std::string_view stage) {
      if (stage == "begin") begin = Clock::now();
      if (stage == "renamed")
        took.push_back(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin));
    };
    try {
      if (run_training(config, options) != RunOutcome::kFinished) ::_exit(1);
    } catch (const std::exception& error) {
      ::_exit(2);
    }
    std::sort(took.begin(), took.end());
    std::ofstream(folder) << took[took.size() / 2].count();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  return std::chrono::microseconds(std::atoll(read_file(folder).c_str()));
}

bool was_writing(const RunConfig& config) {
  std::error_code none;
  for (const auto& entry : fs::directory_iterator(test::checkpoints_of(config), none)) {
    if (entry.path().filename().string().starts_with(".writing-")) return true;
  }
  return false;
}

TEST(Kill, EveryTimeItGoesOnAndEndsWithTheSameBits) {
  const char* asked = std::getenv("FOX_KILLS");
  const int kills = asked ? std::atoi(asked) : 6;
  test::TemporaryFolder folder, other_folder;
  RunConfig undisturbed = test::small_run(other_folder.path()), config = test::small_run(folder.path());
  undisturbed.output.checkpoint_interval_tokens = config.output.checkpoint_interval_tokens = 2 * 64;
  undisturbed.output.keep_last = 100;  // all of them, to compare with
  const auto write_time = run_to_the_end(undisturbed);
  ASSERT_GE(checkpoint::list_checkpoints(test::checkpoints_of(undisturbed)).size(), 20u);

  constexpr Moment kMoments[] = {Moment::kStep, Moment::kWrittenTo, Moment::kWriting, Moment::kWrittenTo,
                                 Moment::kWriting};
  const std::string stages[] = {"begin", "files", "checksums"};
  int inside = 0;
  for (int i = 0; i < kills; ++i) {
    // Up to step 33 of 40: the moment comes with the next checkpoint, and two more steps may be done by then.
    Kill kill{kMoments[i % 5], 1 + 33 * i / kills, stages[i % 3], {}};
    if (kill.moment == Moment::kStep) kill.delay = std::chrono::microseconds(700 * (i % 4));
    if (kill.moment == Moment::kWriting) kill.delay = write_time * (i % 9) / 10;
    ASSERT_TRUE(run_and_kill(config, kill)) << "kill " << i;
    if (was_writing(config)) ++inside;
    // What stands there now is what the undisturbed run had at the same place.
    for (const auto& entry : checkpoint::list_checkpoints(test::checkpoints_of(config))) {
      ASSERT_EQ(checkpoint::checkpoint_damage(entry.dir), "") << "kill " << i;
      ASSERT_EQ(read_file(entry.dir / "checksums.json"),
                read_file(test::checkpoints_of(undisturbed) / entry.dir.filename() / "checksums.json"))
          << "kill " << i;
    }
  }
  run_to_the_end(config);
  EXPECT_EQ(test::final_state(config), test::final_state(undisturbed));
  EXPECT_EQ(test::metrics_of(config), test::metrics_of(undisturbed));
  EXPECT_FALSE(was_writing(config));
  std::printf("%d kills, %d of them inside a write\n", kills, inside);
  EXPECT_GE(inside * 10, kills * 3);
}

}  // namespace
}  // namespace fox::train
