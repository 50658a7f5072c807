#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "dist/launch.h"

// Ranks: processes that train one model together. This room alone knows c10d, torch's collectives: Gloo between CPUs,
// NCCL between GPUs.
namespace fox::dist {

/// A collective on its way. The tensors that it was given must neither be read (those written) nor changed until it is
/// waited for; they are kept alive.
class Transfer {
 public:
  Transfer() = default;  ///< nothing on its way
  /// What is computed after this sees what was received. On a GPU only its current stream waits, not the host. Throws
  /// fox::Error naming the rank at fault when one has ended or has not answered within the group's timeout.
  void wait();
  /// The same, and the host waits too: on a GPU this is where a rank that hangs is noticed.
  void wait_on_host();

 private:
  friend class ProcessGroup;
  struct State;
  std::shared_ptr<State> state_;
};

/// Some ranks that exchange tensors. All of them call the same functions in the same order with the same sizes. A copy
/// is the same group. Tensors are contiguous and on the group's device. A group of one moves nothing and needs no c10d.
///
/// Faults: a rank that is killed, hangs, or reports a failure makes every other one throw fox::Error from the next
/// wait, at the latest after the timeout, with the rank's name in it (always its rank among all, also in a group of
/// some).
class ProcessGroup {
 public:
  /// The group of this process alone.
  ProcessGroup();

  /// All the ranks of `launch`, whose tensors are on `device` (a CUDA device is open by then). Returns when all have
  /// come. Throws fox::Error naming those that have not within `timeout`, or when NCCL is wanted and there is none.
  static ProcessGroup join(const Launch& launch, at::Device device, std::chrono::milliseconds timeout);

  int rank() const;
  int size() const;
  std::chrono::milliseconds timeout() const;
  std::string backend() const;  ///< "gloo", "nccl", or "none" of a group of one

  /// Sum over all ranks, in place; the same bits everywhere.
  [[nodiscard]] Transfer all_reduce(const at::Tensor& tensor) const;
  /// Everybody has what `root` has.
  [[nodiscard]] Transfer broadcast(const at::Tensor& tensor, int root = 0) const;
  /// `all` (size × n elements) becomes the ranks' `part` (n elements) one after the other; `part` may be the rank's own
  /// place in `all`.
  [[nodiscard]] Transfer all_gather(const at::Tensor& all, const at::Tensor& part) const;
  /// `part` (n elements) becomes place number rank() of the sum of `all` (size × n elements); it may be that place. The
  /// rest of `all` is left undefined.
  [[nodiscard]] Transfer reduce_scatter(const at::Tensor& part, const at::Tensor& all) const;
  /// Sends tensors to rank `to` and receives others from rank `from`, in the order given: round a ring, to is rank() +
  /// 1 and from is rank() - 1. Either list may be empty; the sizes are what the other side has.
  [[nodiscard]] Transfer exchange(std::span<const at::Tensor> send, int to, std::span<const at::Tensor> receive,
                                  int from) const;
  /// Throws when a rank has been found at fault. What was on its way between GPUs has then been given up, so what is
  /// read from a GPU may be anything: to be asked before it is kept.
  void check() const;
  /// Returns on the host when all ranks have come here.
  void barrier() const;

  /// Everybody's text, in the order of ranks. By the store: for a few kilobytes before and after the work, not in it.
  std::vector<std::string> gather_texts(const std::string& mine) const;
  /// Rank 0 does `work` while the others wait, for as long as it takes; then everybody goes on.
  void first_alone(const std::function<void()>& work) const;

  /// The ranks that gave the same `color`, ordered by `key`, as a group of their own.
  ProcessGroup split(int color, int key) const;

  /// Tells the others why this rank is about to end; they then throw that with its name instead of guessing.
  void report_failure(const std::string& why) const noexcept;

 private:
  friend struct Transfer::State;
  struct State;
  explicit ProcessGroup(std::shared_ptr<State> state);
  template <typename Start>
  Transfer start(const Start& start, std::vector<at::Tensor> tensors) const;
  std::shared_ptr<State> state_;  ///< nothing for a group of one
};

}  // namespace fox::dist
