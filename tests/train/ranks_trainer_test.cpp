// One model trained by several ranks: what they give against what one process gives.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/safetensors.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "train/trainer.h"

namespace fox::train {
namespace {

using checkpoint::NamedTensors;
using nlohmann::json;
using test::expect_all_fine;
using test::run_ranks;

constexpr std::chrono::seconds kTimeout{120};
constexpr int64_t kRows = 8, kLength = 24, kVocabulary = 61;  // of a step
constexpr int64_t kPoison = 60;                               // a token that only the test of faults uses

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = kVocabulary;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.intermediate_size = 48;
  config.use_k_shift = config.use_v_shift = config.qk_norm = true;
  config.use_output_gate = config.use_output_norm = true;
  config.initializer_range = 0.2;
  return config;
}

/// `seed` 7 everywhere but where a test wants to see that rank 0's weights are taken.
model::LanguageModel make_model(at::ScalarType type, uint64_t seed = 7) {
  model::LanguageModel model(small_config());
  model.init(seed);
  model.to(at::kCPU, type);
  return model;
}

data::Batch batch_of_step(int64_t step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step));
  auto labels = at::randint(1, kPoison, {kRows, kLength}, generator, at::kLong);
  const auto ids = at::cat({at::zeros({kRows, 1}, at::kLong), labels.narrow(1, 0, kLength - 1)}, 1);
  // Ranks have unequal numbers of labels: a mean of the ranks' means would be wrong.
  labels.index_put_({at::arange(3), at::tensor({0, 1, 2})}, -100);
  labels[0].narrow(0, 5, 10).fill_(-100);
  return {ids, labels};
}

/// A rank's rows of it, in `micro_batches` pieces.
std::vector<data::Batch> share_of(const data::Batch& batch, const dist::ProcessGroup& ranks, int64_t micro_batches) {
  const int64_t rows = kRows / ranks.size() / micro_batches;
  std::vector<data::Batch> pieces;
  for (int64_t i = 0; i < micro_batches; ++i) {
    const int64_t first = kRows / ranks.size() * ranks.rank() + i * rows;
    pieces.push_back({batch.ids_BT.narrow(0, first, rows), batch.labels_BT.narrow(0, first, rows)});
  }
  return pieces;
}

TrainerOptions options_of(bool shard) {
  return {.schedule = {.peak = 3e-3, .minimum = 3e-3}, .adamw = {}, .max_grad_norm = 1, .shard_optimizer = shard};
}

struct Setting {
  int size;
  at::ScalarType type;
  bool shard;
  int64_t micro_batches;
  int64_t bucket_bytes = 8192;  // many buckets
};

/// Losses of `steps` steps, then their gradient norms, then sums of the weights: the same text on every rank.
std::string train(const Setting& x, int64_t steps, const dist::Launch& launch) {
  const auto ranks = dist::ProcessGroup::join(launch, at::kCPU, kTimeout);
  auto model = make_model(x.type, launch.rank == 0 ? 7 : 8);
  auto options = options_of(x.shard);
  options.bucket_bytes = x.bucket_bytes;
  Trainer trainer(model, options, ranks);
  json numbers = json::array(), norms = json::array();
  for (int64_t step = 0; step < steps; ++step) {
    const auto result = trainer.step(share_of(batch_of_step(step), ranks, x.micro_batches));
    EXPECT_EQ(result.fault, "");
    EXPECT_EQ(result.tokens, (step + 1) * kRows * kLength);
    numbers.push_back(result.loss);
    norms.push_back(result.grad_norm);
  }
  numbers.insert(numbers.end(), norms.begin(), norms.end());
  for (const auto& parameter : model.parameters()) {
    numbers.push_back(parameter.tensor.detach().to(at::kDouble).abs().sum().item<double>());
  }
  ranks.barrier();
  return numbers.dump();
}

std::vector<double> trajectory(const Setting& setting, int64_t steps) {
  const auto ended = run_ranks(setting.size, [&](const dist::Launch& launch) { return train(setting, steps, launch); });
  expect_all_fine(ended);
  for (const auto& rank : ended) EXPECT_EQ(rank.said, ended[0].said) << "ranks disagree";
  return ended[0].said.empty() ? std::vector<double>{} : json::parse(ended[0].said).get<std::vector<double>>();
}

/// Largest relative distance of the first `count` numbers, or of all.
double worst(const std::vector<double>& a, const std::vector<double>& b, size_t count = SIZE_MAX) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < std::min({a.size(), b.size(), count}); ++i) {
    worst = std::max(worst, std::abs(a[i] - b[i]) / std::abs(b[i]));
  }
  return worst;
}

constexpr int64_t kSteps = 50;

// In float64 the order of sums is all that differs.
TEST(RanksTrainer, AsManyRanksAsYouLike) {
  const auto alone = trajectory({1, at::kDouble, true, 1}, kSteps);
  for (const Setting& x : {Setting{2, at::kDouble, false, 1},
                           {4, at::kDouble, false, 1},
                           {2, at::kDouble, true, 2},
                           {4, at::kDouble, true, 1},
                           {2, at::kDouble, false, 4}}) {
    const auto several = trajectory(x, kSteps);
    EXPECT_LT(worst(several, alone), 1e-10)
        << x.size << " ranks, sharded " << x.shard << ", micro-batches " << x.micro_batches;
    std::printf("float64, %d ranks: losses within %.1e, all within %.1e of one process\n", x.size,
                worst(several, alone, kSteps), worst(several, alone));
  }
}

// In float32, no further from float64 than twice what one process is.
TEST(RanksTrainer, InFloat32AsNearToTheTruthAsOneProcess) {
  const auto truth = trajectory({1, at::kDouble, true, 1}, kSteps),
             alone = trajectory({1, at::kFloat, true, 1}, kSteps);
  for (const int size : {2, 4}) {
    const auto several = trajectory({size, at::kFloat, true, 1}, kSteps);
    EXPECT_LT(worst(several, truth), 2 * worst(alone, truth) + 1e-6) << size << " ranks";
    std::printf("float32, %d ranks: losses within %.1e of one process, which is within %.1e of float64\n", size,
                worst(several, alone, kSteps), worst(alone, truth, kSteps));
  }
}

TEST(RanksTrainer, ShareTheMemoryOfTheOptimizer) {
  int64_t whole = 0;
  for (const auto& parameter : make_model(at::kFloat).parameters()) whole += 2 * parameter.tensor.nbytes();
  for (const bool shard : {false, true}) {
    for (const int size : {1, 2, 4}) {
      const auto ended = run_ranks(size, [&](const dist::Launch& launch) {
        const auto ranks = dist::ProcessGroup::join(launch, at::kCPU, kTimeout);
        auto model = make_model(at::kFloat);
        const Trainer trainer(model, options_of(shard), ranks);
        int64_t bytes = 0;
        for (const auto& [name, tensor] : trainer.tensors()) bytes += static_cast<int64_t>(tensor.nbytes());
        ranks.barrier();
        return std::to_string(bytes);
      });
      expect_all_fine(ended);
      int64_t all = 0;
      for (const auto& rank : ended) {
        const int64_t bytes = std::stoll(rank.said);
        all += bytes;
        // But for the few elements that parameters are set apart by.
        EXPECT_LE(bytes, shard ? whole / size + whole / 50 : whole) << size;
      }
      EXPECT_EQ(all, shard ? whole : whole * size);
    }
  }
}

NamedTensors moments_of(const Trainer& trainer) {
  NamedTensors moments;
  trainer.visit_tensors([&](const std::string& name, const at::Tensor& tensor) { moments[name] = tensor.clone(); });
  return moments;
}

NamedTensors weights_of(const model::LanguageModel& model) {
  NamedTensors weights;
  for (const auto& parameter : model.parameters()) weights[parameter.name] = parameter.tensor.detach().clone();
  return weights;
}

void expect_same_bits(const NamedTensors& a, const NamedTensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, tensor] : a) EXPECT_TRUE(at::equal(tensor, b.at(name))) << name;
}

// What one process saves, any number of ranks takes over and gives back bit for bit, and goes on from alike.
TEST(RanksTrainer, StateDoesNotDependOnTheNumberOfRanks) {
  const test::TemporaryFolder folder;
  const auto weights_file = folder.path() / "weights", moments_file = folder.path() / "moments";
  auto model = make_model(at::kDouble);
  Trainer alone(model, options_of(true));
  for (int64_t step = 0; step < 5; ++step) alone.step(std::vector{batch_of_step(step)});
  checkpoint::write_safetensors(weights_file, weights_of(model));
  checkpoint::write_safetensors(moments_file, moments_of(alone));
  const auto state = alone.state_json();
  std::vector<double> next;
  for (int64_t step = 5; step < 8; ++step) next.push_back(alone.step(std::vector{batch_of_step(step)}).loss);

  for (const bool shard : {false, true}) {
    for (const int size : {1, 2, 4}) {
      expect_all_fine(run_ranks(size, [&](const dist::Launch& launch) {
        const auto ranks = dist::ProcessGroup::join(launch, at::kCPU, kTimeout);
        auto model = make_model(at::kDouble, 9);
        Trainer trainer(model, options_of(shard), ranks);
        const auto weights = checkpoint::read_safetensors(weights_file).tensors;
        const auto moments = checkpoint::read_safetensors(moments_file).tensors;
        if (launch.rank == 0) {
          const at::NoGradGuard no_grad;
          for (const auto& parameter : model.parameters())
            at::Tensor(parameter.tensor).copy_(weights.at(parameter.name));
        }
        trainer.restore(state, launch.rank == 0 ? moments : NamedTensors{}, "state");
        expect_same_bits(moments_of(trainer), moments);
        expect_same_bits(weights_of(model), weights);
        EXPECT_EQ(trainer.state_json(), state);
        for (const auto& [name, shape] : trainer.shapes()) EXPECT_EQ(shape.sizes(), moments.at(name).sizes()) << name;
        for (int64_t step = 5; step < 8; ++step) {
          const double loss = trainer.step(share_of(batch_of_step(step), ranks, 1)).loss;
          EXPECT_NEAR(loss, next[step - 5], 1e-10);
        }
        ranks.barrier();
        return "";
      }));
    }
  }
}

// A token whose embedding is infinite, in one rank's micro-batch: a gate is then not finite, which that rank notices in
// the middle of its pass and the others only by it.
TEST(RanksTrainer, AFaultOfOneRankIsKeptOutOfAll) {
  for (const bool shard : {false, true}) {
    for (const int64_t micro_batches : {int64_t{1}, int64_t{2}}) {
      expect_all_fine(run_ranks(2, [&](const dist::Launch& launch) {
        const auto ranks = dist::ProcessGroup::join(launch, at::kCPU, kTimeout);
        auto model = make_model(at::kFloat);
        Trainer trainer(model, options_of(shard), ranks);
        const auto good = [&](int64_t step) {
          return trainer.step(share_of(batch_of_step(step), ranks, micro_batches)).fault;
        };
        EXPECT_EQ(good(0), "");
        const auto before = weights_of(model), moments = moments_of(trainer);
        auto bad = batch_of_step(1);
        bad.ids_BT[kRows - 1][3].fill_(kPoison);
        {
          const at::NoGradGuard no_grad;
          const auto embedding = model.parameters().front().tensor;
          EXPECT_EQ(embedding.size(0), kVocabulary);
          embedding[kPoison].fill_(INFINITY);
        }
        const auto result = trainer.step(share_of(bad, ranks, micro_batches));
        EXPECT_TRUE(std::isnan(result.loss));
        if (launch.rank == 0) {
          EXPECT_EQ(result.fault, micro_batches == 1 ? "the loss of micro-batch 1 of 1 on rank 1 is nan"
                                                     : "the loss of micro-batch 1 of 2 on rank 1 is nan");
        }
        EXPECT_NE(result.fault, "");
        EXPECT_EQ(trainer.state().bad_steps, 1);
        {
          const at::NoGradGuard no_grad;
          model.parameters().front().tensor[kPoison].copy_(before.begin()->second.new_zeros({32}));
        }
        const at::NoGradGuard no_grad;
        auto after = weights_of(model), expected = before;
        const std::string embedding = model.parameters().front().name;
        after.at(embedding)[kPoison].zero_();
        expected.at(embedding)[kPoison].zero_();
        expect_same_bits(after, expected);
        expect_same_bits(moments_of(trainer), moments);
        {
          at::AutoGradMode grad(true);
          EXPECT_EQ(good(2), "");
          EXPECT_EQ(good(3), "");
        }
        ranks.barrier();
        return "";
      }));
    }
  }
}

TEST(RanksTrainer, OneThatIsAskedToStopTellsAll) {
  expect_all_fine(run_ranks(4, [](const dist::Launch& launch) {
    const auto ranks = dist::ProcessGroup::join(launch, at::kCPU, kTimeout);
    auto model = make_model(at::kFloat);
    Trainer trainer(model, options_of(true), ranks);
    for (int64_t step = 0; step < 4; ++step) {
      if (step == 2 && launch.rank == 3) trainer.ask_to_stop();
      EXPECT_EQ(trainer.step(share_of(batch_of_step(step), ranks, 1)).stop, step >= 2);
    }
    ranks.barrier();
    return "";
  }));
}

}  // namespace
}  // namespace fox::train
