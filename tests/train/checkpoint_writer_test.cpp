#include "train/checkpoint_writer.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <future>

#include "base/error.h"
#include "base/files.h"
#include "support/temporary_folder.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using checkpoint::NamedTensors;

void write_nothing(const fs::path&) {}
void no_moments(const TensorSink&) {}

// The thread is held at the first stage of its write, so that what is tested happens while it writes.
struct HeldStore {
  test::TemporaryFolder folder;
  std::promise<void> release;
  std::shared_future<void> released = release.get_future().share();
  CheckpointStore store{folder.path(), {.keep_last = 9, .keep_every_tokens = 0, .on_stage = [this](std::string_view) {
                                          released.wait();
                                        }}};
};

TEST(CheckpointWriter, WritesWhatWasThereWhenItWasAsked) {
  HeldStore held;
  CheckpointWriter writer(held.store, [](const fs::path& dir) { write_file_atomically(dir / "rest", "r"); });
  const NamedTensors weights{{"w", at::ones({3})}}, moments{{"m", at::full({2}, 5.0)}};
  writer.prepare(weights, moments);
  const auto visit = [&](const TensorSink& sink) { sink("m", moments.at("m")); };
  writer.save(64, weights, visit, {{"trainer.json", "{}"}});
  weights.at("w").detach().fill_(-1);
  moments.at("m").detach().fill_(-1);
  EXPECT_TRUE(checkpoint::list_checkpoints(held.folder.path()).empty());
  held.release.set_value();
  writer.finish();
  const auto dir = held.folder.path() / checkpoint::checkpoint_name(64);
  EXPECT_EQ(checkpoint::checkpoint_damage(dir), "");
  EXPECT_TRUE(at::equal(checkpoint::read_safetensors(dir / "model.safetensors").tensors.at("w"), at::ones({3})));
  EXPECT_TRUE(at::equal(checkpoint::read_safetensors(dir / "trainer.safetensors").tensors.at("m"), at::full({2}, 5.0)));
  EXPECT_EQ(read_file(dir / "trainer.json"), "{}");
  EXPECT_EQ(read_file(dir / "rest"), "r");
}

TEST(CheckpointWriter, SavesOneAfterAnother) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path(), {.keep_last = 9, .keep_every_tokens = 0, .on_stage = {}});
  CheckpointWriter writer(store, write_nothing);
  for (int64_t i = 1; i <= 5; ++i) writer.save(i, {{"w", at::full({3}, i, at::kDouble)}}, no_moments, {});
  writer.finish();
  const auto all = checkpoint::list_checkpoints(folder.path());
  ASSERT_EQ(all.size(), 5u);
  for (const auto& entry : all) {
    const auto w = checkpoint::read_safetensors(entry.dir / "model.safetensors").tensors.at("w");
    EXPECT_EQ(w[2].item<double>(), static_cast<double>(entry.tokens));
  }
}

// As when a rank has ended, and the GPU no longer waits for it.
TEST(CheckpointWriter, WritesNoCopiesThatAreNoGood) {
  test::TemporaryFolder folder;
  CheckpointStore store(folder.path(), {.keep_last = 9, .keep_every_tokens = 0, .on_stage = {}});
  CheckpointWriter writer(store, write_nothing, [] { throw Error("rank 1 of 2 has ended"); });
  EXPECT_THROW(writer.save(10, {{"w", at::ones({2})}}, no_moments, {}), Error);
  writer.finish();
  EXPECT_TRUE(checkpoint::list_checkpoints(folder.path()).empty());
}

// Whichever way the loop asks next, it learns of the failure, once; the checkpoint before still stands.
TEST(CheckpointWriter, AFailureReachesTheLoop) {
  for (const char* asked_by : {"check", "finish", "save"}) {
    test::TemporaryFolder folder;
    CheckpointStore store(folder.path(), {.keep_last = 9, .keep_every_tokens = 0, .on_stage = {}});
    bool full = false;
    CheckpointWriter writer(store, [&](const fs::path&) {
      if (full) throw Error("no space left on device");
    });
    const NamedTensors weights{{"w", at::ones({3})}};
    writer.save(1, weights, no_moments, {});
    writer.finish();
    full = true;
    writer.save(2, weights, no_moments, {});
    const auto ask = [&] {
      if (asked_by == std::string("finish")) return writer.finish();
      if (asked_by == std::string("save")) return writer.save(3, weights, no_moments, {});
      for (int i = 0; i < 1000; ++i) {
        writer.check();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    };
    EXPECT_THROW(ask(), Error) << asked_by;
    EXPECT_NO_THROW(writer.check());
    ASSERT_EQ(checkpoint::list_checkpoints(folder.path()).size(), 1u);
    EXPECT_EQ(checkpoint::newest_checkpoint(folder.path())->tokens, 1);
    full = false;
    writer.save(4, weights, no_moments, {});
    writer.finish();
    EXPECT_EQ(checkpoint::newest_checkpoint(folder.path())->tokens, 4);
  }
}

}  // namespace
}  // namespace fox::train
