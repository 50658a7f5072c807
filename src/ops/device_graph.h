#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>

namespace fox::ops {

/// Work of a device that is recorded once and then started again as a whole, without the host going through it: a CUDA
/// graph. What is repeated are the kernels with the addresses they had: the work reads its inputs from tensors that
/// stay and leaves its results in those it made, and nothing in it may depend on what the host decides (sizes, learning
/// rates, which branch) or has kept from before (a cast that it need not make again).
class DeviceGraph {
 public:
  /// Nothing for a device that has no such thing (a CPU).
  static std::unique_ptr<DeviceGraph> make(at::Device device);
  virtual ~DeviceGraph() = default;

  /// Does `work` where it would be recorded: on a stream of the graph's own, behind what the current stream has, which
  /// goes on when it is done. What libraries set up on first use must have been done so once before record().
  virtual void run(const std::function<void()>& work) = 0;
  /// Records `work`, of which nothing is computed. Waits for the device and hands its unused memory back first, since
  /// what is recorded has memory of its own, for as long as the graph lives. Once a graph; throws c10::Error, or what
  /// `work` throws, and the graph is of no use then.
  virtual void record(const std::function<void()>& work) = 0;
  virtual bool recorded() const = 0;
  /// Starts what was recorded, in order with the current stream like run().
  virtual void replay() = 0;
  /// What kernels have found wrong with their inputs since this was asked, which a later call would otherwise throw
  /// (gate_report_cuda.h) and a replay cannot; "" when nothing. Waits for nothing.
  virtual std::string take_report() = 0;
};

/// The CUDA backend, a library of its own, says when it is loaded how one is made (nothing for devices it does not
/// know).
void register_device_graph(std::unique_ptr<DeviceGraph> (*make)(at::Device));

}  // namespace fox::ops
