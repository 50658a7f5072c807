// When a step is run, recorded and replayed, and what it reads; with a graph of the host's that only keeps count. That
// a CUDA graph gives the bits of the steps themselves is for tools/gpu/check_training.py.
#include "train/step_graph.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace fox::train {
namespace {

struct Counts {
  int run = 0, recorded = 0, replayed = 0;
};

class CountingGraph : public ops::DeviceGraph {
 public:
  explicit CountingGraph(Counts& counts) : counts_(counts) {}
  void run(const std::function<void()>& work) override {
    ++counts_.run;
    work();
  }
  void record(const std::function<void()>& work) override {
    ++counts_.recorded;
    work();
  }
  bool recorded() const override { return counts_.recorded > 0; }
  void replay() override { ++counts_.replayed; }
  std::string take_report() override { return ""; }

 private:
  Counts& counts_;
};

StepInputs inputs_of(int64_t value, int64_t length = 4, bool weight = false) {
  StepInputs inputs;
  for (int64_t i = 0; i < 2; ++i) {
    const auto ids = at::full({1, length}, 10 * value + i, at::kLong);
    inputs.micro_batches.push_back({ids, ids + 100});
  }
  if (weight) inputs.label_weight = at::scalar_tensor(0.5 * static_cast<double>(value), at::kDouble);
  inputs.lr = at::scalar_tensor(static_cast<double>(value), at::kDouble);
  return inputs;
}

/// Everything of the inputs in one row.
at::Tensor row_of(const StepInputs& inputs) {
  std::vector<at::Tensor> parts{inputs.lr.view(1)};
  if (inputs.label_weight) parts.push_back(inputs.label_weight->view(1));
  for (const auto& batch : inputs.micro_batches) {
    parts.push_back(batch.ids_BT.flatten().to(at::kDouble));
    parts.push_back(batch.labels_BT.flatten().to(at::kDouble));
  }
  return at::cat(parts);
}

TEST(StepGraph, RunsTwoStepsRecordsTheThirdAndReplaysWithEachStepsInputs) {
  for (const bool weight : {false, true}) {
    Counts counts;
    StepGraph graph(std::make_unique<CountingGraph>(counts));
    std::vector<StepInputs> seen;
    const StepWork work = [&](const StepInputs& in) {
      seen.push_back(in);
      return StepOutputs{row_of(in), {1, 2}};
    };
    for (int64_t step = 1; step <= 5; ++step) {
      const auto done = graph.run(inputs_of(step, 4, weight), work);
      EXPECT_EQ(done.replayed, step >= 3);
      EXPECT_EQ(done.outputs.parameters, (std::vector<size_t>{1, 2}));
      // Where the recorded work reads, it finds this step's inputs.
      EXPECT_TRUE(at::equal(row_of(seen.back()), row_of(inputs_of(step, 4, weight))));
    }
    EXPECT_EQ(seen.size(), 3U);
    EXPECT_EQ(counts.run, 2);
    EXPECT_EQ(counts.recorded, 1);
    EXPECT_EQ(counts.replayed, 3);
  }
}

TEST(StepGraph, LeavesTheCallersTensorsAlone) {
  Counts counts;
  StepGraph graph(std::make_unique<CountingGraph>(counts));
  const auto first = inputs_of(1);
  const StepWork work = [](const StepInputs& in) { return StepOutputs{row_of(in), {}}; };
  graph.run(first, work);
  graph.run(inputs_of(2), work);
  EXPECT_TRUE(at::equal(row_of(first), row_of(inputs_of(1))));
}

TEST(StepGraph, RunsStepsOfOtherShapesAsTheyAre) {
  Counts counts;
  StepGraph graph(std::make_unique<CountingGraph>(counts));
  const StepWork work = [](const StepInputs& in) { return StepOutputs{row_of(in), {}}; };
  for (int64_t step = 1; step <= 3; ++step) graph.run(inputs_of(step), work);
  auto one = inputs_of(4);
  one.micro_batches.pop_back();
  for (const auto& other : {inputs_of(4, 3), inputs_of(4, 4, true), one}) {
    const auto done = graph.run(other, work);
    EXPECT_FALSE(done.replayed);
    EXPECT_TRUE(at::equal(done.outputs.numbers, row_of(other)));
  }
  EXPECT_TRUE(graph.run(inputs_of(5), work).replayed);
  EXPECT_EQ(counts.replayed, 2);
}

TEST(StepGraph, IsNothingOnACpu) { EXPECT_EQ(StepGraph::make(at::kCPU), nullptr); }

}  // namespace
}  // namespace fox::train
