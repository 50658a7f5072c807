#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "config/run_config.h"
#include "dist/process_group.h"
#include "dist/sequence_shard.h"

namespace fox::train {

/// The part of each step's batch that is a rank's: contexts in the order of the stream, so that which tokens a step
/// has, and in what order, does not depend on the number of ranks.
struct StepShare {
  int64_t step_contexts = 0;  ///< of the whole step
  int64_t first = 0;          ///< of the rank's contexts in it
  int64_t contexts = 0;
  int64_t micro_batches = 0;  ///< that these are cut into, as even as can be

  /// Context number `begin` and how many follow, of micro-batch `index` counted over all steps.
  struct Rows {
    int64_t begin, count;
  };
  Rows rows(int64_t index) const;
};

/// Ranks that hold a context together (train.sequence_ranks) have the same share. Throws fox::Error when the contexts
/// of a step do not divide among the ranks: fewer of them than ranks, or uneven.
StepShare share_of_step(const RunConfig& config, int rank, int ranks);

/// "cuda" becomes the GPU of the rank's number on this machine. Throws UsageError when the device is one GPU for
/// several ranks.
void choose_device(std::string& device, const dist::Launch& launch);

/// Joins the ranks of `launch` on the device that is this one's and prints a line to standard error of how this one is
/// set up (a lone one says nothing). Throws fox::Error when ranks were started with different configurations (naming
/// the keys) or by different builds.
dist::ProcessGroup join_ranks(const RunConfig& config, const dist::Launch& launch);

/// Throws fox::Error unless `together` ranks to a context leave none of `ranks` over.
void check_sequence_ranks(int64_t together, int ranks);

/// The `together` neighbours with which this rank holds its contexts, or nothing when each has its own whole.
std::shared_ptr<const dist::SequenceShard> split_sequences(int64_t together, const dist::ProcessGroup& ranks);

/// Throws fox::Error naming the rank when `what` (text to compare) is not the same on each.
void check_same_on_all(const dist::ProcessGroup& ranks, const std::string& what, const std::string& text);

}  // namespace fox::train
