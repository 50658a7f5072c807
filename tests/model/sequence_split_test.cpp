// A model whose sequences are split over ranks against the same model that has them whole: loss and every gradient.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>

#include "model/language_model.h"
#include "support/errors.h"
#include "support/ranks.h"
#include "support/small_models.h"

namespace fox::model {
namespace {

using Shard = std::shared_ptr<const dist::SequenceShard>;

struct Whole {
  double loss = 0;
  std::map<std::string, at::Tensor> gradients;
};

Whole backward(LanguageModel& model, const Loss& loss) {
  loss.total.backward();
  Whole whole{loss.total.item<double>(), {}};
  for (const auto& parameter : model.parameters()) {
    auto& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined()) whole.gradients[parameter.name] = gradient;
    gradient = at::Tensor();
  }
  return whole;
}

/// Every rank's sum.
Whole summed(Whole part, const dist::ProcessGroup& group) {
  const auto loss = at::full({1}, part.loss, at::kDouble);
  group.all_reduce(loss).wait();
  part.loss = loss.item<double>();
  for (auto& [name, gradient] : part.gradients) {
    gradient = gradient.contiguous();
    group.all_reduce(gradient).wait();
  }
  return part;
}

void expect_split_equals_whole(const test::SmallModel& small, Recompute recompute, const Shard& shard) {
  SCOPED_TRACE(small.name);
  auto model = test::random_model(small, 3);
  model.set_requires_grad(true);
  model.set_recompute(recompute);
  at::manual_seed(5);
  const auto ids_BT = at::randint(0, 41, {2, 48}, at::kLong);
  const auto labels_BT = at::randint(0, 41, {2, 48}, at::kLong).masked_fill(at::rand({2, 48}) < 0.2, -100);
  const auto weight_BT = at::full({2, 48}, 1 / labels_BT.ne(-100).sum().item<double>(), at::kDouble);

  const auto whole = backward(model, model.loss(ids_BT, labels_BT, {}, weight_BT));
  nn::Sequence sequence;
  sequence.shard = shard;
  const auto part = model.loss(shard->take(ids_BT), shard->take(labels_BT), sequence, shard->take(weight_BT));
  const auto split = summed(backward(model, part), shard->group());

  EXPECT_NEAR(split.loss, whole.loss, 1e-12 * whole.loss);
  ASSERT_EQ(split.gradients.size(), whole.gradients.size());
  for (const auto& [name, gradient] : whole.gradients) {
    test::expect_close(split.gradients.at(name), gradient, 1e-10, 1e-14, name);
  }
}

void on_ranks(int size, const std::function<void(const Shard&)>& body) {
  test::expect_all_fine(test::run_ranks(size, [&](const dist::Launch& launch) {
    const auto group = dist::ProcessGroup::join(launch, at::kCPU, std::chrono::seconds(120));
    body(std::make_shared<dist::SequenceShard>(group));
    group.barrier();
    return std::string("done");
  }));
}

class SplitSequence : public testing::TestWithParam<int> {};

TEST_P(SplitSequence, LossAndGradientsAreThoseOfTheWhole) {
  on_ranks(GetParam(), [](const Shard& shard) {
    for (const auto& small : test::small_models()) expect_split_equals_whole(small, Recompute::kNone, shard);
  });
}

TEST_P(SplitSequence, AlsoWhenLayersAreComputedAgain) {
  on_ranks(GetParam(), [](const Shard& shard) {
    for (const auto& small : test::small_models()) {
      if (small.name != "fox_pro" && small.name != "samba") continue;
      expect_split_equals_whole(small, Recompute::kFull, shard);
      expect_split_equals_whole(small, Recompute::kMlp, shard);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SplitSequence, testing::Values(1, 2, 4));

}  // namespace
}  // namespace fox::model
