#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/batch_stream.h"
#include "ops/device_graph.h"

namespace fox::train {

/// All that a step's work on its device depends on and that is another in the next step; on that device.
struct StepInputs {
  std::vector<data::Batch> micro_batches;
  std::optional<at::Tensor> label_weight;  ///< 1 / labels of the whole step, scalar; none: a micro-batch's own mean
  at::Tensor lr;                           ///< AdamW::device_lr()
};

/// What is left of it, besides the parameters and the moments.
struct StepOutputs {
  at::Tensor numbers;              ///< (N,) float64 on the device, see Trainer; undefined when nothing was computed
  std::vector<size_t> parameters;  ///< of the norms among them
};

using StepWork = std::function<StepOutputs(const StepInputs&)>;

/// Repeats steps of one shape as a CUDA graph, so that the host need not launch their kernels one by one. The first
/// two steps run as they are (what libraries set up on first use is then there), the third is recorded. Steps of other
/// shapes than the first, the last one of some runs, run as they are.
class StepGraph {
 public:
  static constexpr int kStepsBefore = 2;  ///< that run as they are

  explicit StepGraph(std::unique_ptr<ops::DeviceGraph> graph) : graph_(std::move(graph)) {}
  /// Nothing where the device has no graphs.
  static std::unique_ptr<StepGraph> make(at::Device device);

  /// Does `work` with `inputs`; whether as a replay. All calls give the same work.
  struct Done {
    StepOutputs outputs;
    bool replayed;  ///< nothing on the host was told of it: not autograd, which counts versions
  };
  Done run(const StepInputs& inputs, const StepWork& work);
  /// See DeviceGraph.
  std::string take_report() { return graph_->take_report(); }

 private:
  bool fits(const StepInputs& inputs) const;
  void fill(const StepInputs& inputs);

  std::unique_ptr<ops::DeviceGraph> graph_;
  std::optional<StepInputs> inputs_;  ///< where the recorded work reads
  StepOutputs outputs_;               ///< where it leaves its results
  int steps_ = 0;
};

}  // namespace fox::train
