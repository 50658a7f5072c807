#pragma once

#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <string>

#include "checkpoint/safetensors.h"
#include "train/checkpoint_store.h"
#include "train/parameter_buckets.h"

namespace fox::train {

/// Writes checkpoints by a thread of its own while training goes on: save() copies what it is given to the host (from a
/// GPU into pinned memory, which is kept for the next time) and returns. One checkpoint is written at a time.
class CheckpointWriter {
 public:
  /// `write_rest` adds the files that never change during a run; the thread calls it. `check_copies` throws when what
  /// has just arrived on the host must not be written.
  CheckpointWriter(
      CheckpointStore& store, std::function<void(const std::filesystem::path& dir)> write_rest,
      std::function<void()> check_copies = [] {});
  /// Waits for a checkpoint that is being written.
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Gets memory for copies of tensors like these ahead of the first save(), beside whatever else is done.
  void prepare(const checkpoint::NamedTensors& weights, const checkpoint::NamedTensors& moments);

  /// Hands one tensor after another to a sink, so that not all of them need exist at once.
  using Visit = std::function<void(const TensorSink& sink)>;
  /// The checkpoint at `tokens`: model.safetensors, trainer.safetensors and `texts` (content by file name). Waits for
  /// the one before, throwing what it threw.
  void save(int64_t tokens, const checkpoint::NamedTensors& weights, const Visit& moments,
            std::map<std::string, std::string> texts);
  /// Throws what went wrong with a checkpoint since this was last asked, if anything has.
  void check();
  /// Waits until nothing is being written, then as check().
  void finish();

 private:
  checkpoint::NamedTensors weights_, moments_;  ///< on the host
  CheckpointStore& store_;
  std::function<void(const std::filesystem::path& dir)> write_rest_;
  std::function<void()> check_copies_;
  std::future<void> writing_;  // the last member: its end waits for the thread, which uses the others
};

}  // namespace fox::train
