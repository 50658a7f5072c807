// Gradients that are known in closed form, so many buckets that they are sent in the middle of the backward pass.

#include "train/parameter_buckets.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "support/ranks.h"

namespace fox::train {
namespace {

constexpr std::chrono::seconds kTimeout{120};
constexpr int64_t kBucketBytes = 1024;  // 128 float64

nn::Parameters make_parameters() {
  nn::Parameters parameters;
  int64_t number = 0;
  for (const at::IntArrayRef sizes : {at::IntArrayRef{3}, {70}, {20, 10}, {5}, {64}, {1, 1}, {130}}) {
    const auto values = at::arange(1, 1 + c10::multiply_integers(sizes), at::kDouble).view(sizes) + 1000 * number;
    parameters.push_back({"p" + std::to_string(number++), values.clone().requires_grad_(true)});
  }
  parameters[3].trainable = false;
  parameters[3].tensor.requires_grad_(false);
  return parameters;
}

/// Whose gradient of parameter i is, everywhere, (rank + 1) (i + 1); of the first `count` parameters from the last one.
void backward(const nn::Parameters& parameters, int rank, int64_t count = 7, int64_t left_out = -1) {
  auto loss = at::zeros({}, at::kDouble);
  for (int64_t i = 6; i > 6 - count; --i) {
    if (i != left_out && parameters[i].trainable)
      loss = loss + static_cast<double>((rank + 1) * (i + 1)) * parameters[i].tensor.sum();
  }
  loss.backward();
}

/// Expects the gradients to be those of `passes` such passes of all ranks, of parameter `left_out` those of rank 0
/// only.
void expect_sums(const ParameterBuckets& buckets, int ranks, int64_t passes, int64_t left_out = -1) {
  const auto indices = buckets.own_indices();
  ASSERT_EQ(indices.numel(), std::ssize(buckets.own()));
  for (int64_t k = 0; k < indices.numel(); ++k) {
    const int64_t i = indices[k].item<int64_t>();
    const int64_t all = i == left_out ? 1 : ranks * (ranks + 1) / 2;
    const auto gradient = buckets.own()[k].tensor.grad();
    EXPECT_TRUE(at::equal(gradient, at::full_like(gradient, passes * (i + 1) * all))) << buckets.own()[k].name;
  }
}

class Buckets : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  using Body = std::function<void(const dist::ProcessGroup&, const nn::Parameters&, ParameterBuckets&)>;
  void run(const Body& body) {
    const auto [size, sharded] = GetParam();
    test::expect_all_fine(test::run_ranks(size, [&, sharded = sharded](const dist::Launch& launch) {
      const auto ranks = dist::ProcessGroup::join(launch, at::kCPU, kTimeout);
      const auto parameters = make_parameters();
      ParameterBuckets buckets(parameters, ranks, sharded, kBucketBytes);
      body(ranks, parameters, buckets);
      ranks.barrier();
      return "";
    }));
  }
};

TEST_P(Buckets, AddUpAllRanksAndPasses) {
  run([](const auto& ranks, const auto& parameters, auto& buckets) {
    for (const int64_t passes : {1, 3, 1}) {
      buckets.begin_step(passes > 1);
      for (int64_t pass = 1; pass <= passes; ++pass) {
        if (pass == passes) buckets.last_pass();
        backward(parameters, ranks.rank());
      }
      buckets.finish_gradients(false);
      expect_sums(buckets, ranks.size(), passes);
    }
  });
}

TEST_P(Buckets, AParameterThatOneRankDidNotUse) {
  run([](const auto& ranks, const auto& parameters, auto& buckets) {
    buckets.begin_step(false);
    buckets.last_pass();
    backward(parameters, ranks.rank(), 7, ranks.rank() == 0 ? -1 : 2);
    buckets.finish_gradients(false);
    expect_sums(buckets, ranks.size(), 1, 2);
  });
}

// What was sent before the pass broke off stays, the rest comes from the second one.
TEST_P(Buckets, APassThatIsDoneAgain) {
  run([](const auto& ranks, const auto& parameters, auto& buckets) {
    for (const bool several : {false, true}) {
      buckets.begin_step(several);
      if (several) backward(parameters, ranks.rank());
      buckets.last_pass();
      if (ranks.rank() == 1) {
        backward(parameters, ranks.rank(), 3);
        buckets.begin_step(several);
        if (several) backward(parameters, ranks.rank());
        buckets.last_pass();
      }
      backward(parameters, ranks.rank());
      buckets.finish_gradients(false);
      expect_sums(buckets, ranks.size(), several ? 2 : 1);
    }
  });
}

TEST_P(Buckets, AFaultReachesAllRanksAndIsForgotten) {
  run([](const auto& ranks, const auto& parameters, auto& buckets) {
    buckets.begin_step(false);
    buckets.last_pass();
    const bool faulty = ranks.rank() == 1;
    backward(parameters, ranks.rank(), faulty ? 2 : 7);
    buckets.finish_gradients(faulty);
    auto finite = at::ones({1});
    for (const auto& parameter : buckets.own()) finite *= at::isfinite(parameter.tensor.grad()).all();
    const auto all = finite.neg().add(1);
    ranks.all_reduce(all).wait();
    EXPECT_GT(all.template item<float>(), 0) << "nobody has been told";

    buckets.begin_step(false);
    buckets.last_pass();
    backward(parameters, ranks.rank());
    buckets.finish_gradients(false);
    expect_sums(buckets, ranks.size(), 1);
  });
}

// Each adds 1 to what is its own; all then have every weight one greater, one after another as they are waited for.
TEST_P(Buckets, WeightsComeFromThoseWhoUpdatedThem) {
  run([](const auto&, const auto& parameters, auto& buckets) {
    const at::NoGradGuard no_grad;
    const auto before = make_parameters();
    std::vector<int64_t> versions;
    for (const auto& parameter : parameters) versions.push_back(parameter.tensor._version());
    for (const auto& parameter : buckets.own()) at::Tensor(parameter.tensor).add_(1);
    buckets.gather_weights();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (!parameters[i].trainable) continue;
      buckets.wait_for_weights(i + 1);
      EXPECT_TRUE(at::equal(parameters[i].tensor, before[i].tensor + 1)) << parameters[i].name;
      EXPECT_GT(parameters[i].tensor._version(), versions[i]) << parameters[i].name;
    }
  });
}

TEST_P(Buckets, StateIsPutTogetherAndHandedOut) {
  run([](const auto& ranks, const auto& parameters, auto& buckets) {
    checkpoint::NamedTensors own, again, whole;
    for (const auto& parameter : buckets.own()) {
      own["m." + parameter.name] = parameter.tensor.detach() * 2;
      again["m." + parameter.name] = at::zeros_like(parameter.tensor);
    }
    buckets.gather(own, "m.", [&](const std::string& name, const at::Tensor& t) { whole[name] = t.clone(); });
    EXPECT_EQ(whole.size(), 6u);
    for (const auto& parameter : parameters) {
      if (!parameter.trainable) continue;
      EXPECT_TRUE(at::equal(whole.at("m." + parameter.name), parameter.tensor * 2)) << parameter.name;
    }
    if (ranks.rank() > 0) whole.clear();
    buckets.scatter(whole, "m.", again);
    for (const auto& [name, tensor] : own) EXPECT_TRUE(at::equal(tensor, again.at(name))) << name;
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Buckets, ::testing::Combine(::testing::Values(2, 4), ::testing::Bool()));

}  // namespace
}  // namespace fox::train
