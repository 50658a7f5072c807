#include "train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/error.h"
#include "checkpoint/hf_directory.h"
#include "checkpoint/safetensors.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using checkpoint::NamedTensors;
using nlohmann::json;

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.num_hidden_layers = 2;
  config.num_heads = 2;
  config.intermediate_size = 48;
  config.use_k_shift = config.use_v_shift = config.qk_norm = true;
  config.use_output_gate = config.use_output_norm = true;
  config.initializer_range = 0.2;
  return config;
}

model::LanguageModel make_model(const ModelConfig& config, at::ScalarType type, at::ScalarType compute) {
  model::LanguageModel model(config);
  model.init(7);
  model.to(at::kCPU, type);
  if (compute != type) model.set_compute_dtype(compute);
  return model;
}

data::Batch make_batch(int64_t rows, int64_t length, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto labels = at::randint(1, 61, {rows, length}, generator, at::kLong);
  const auto ids = at::cat({at::zeros({rows, 1}, at::kLong), labels.narrow(1, 0, length - 1)}, 1);
  return {ids, labels};
}

NamedTensors copy_of(const model::LanguageModel& model) {
  NamedTensors copy;
  for (const auto& parameter : model.parameters()) copy[parameter.name] = parameter.tensor.detach().clone();
  return copy;
}

bool same_bits(const NamedTensors& a, const NamedTensors& b) {
  if (a.size() != b.size()) return false;
  for (const auto& [name, tensor] : a) {
    if (!b.contains(name) || !at::equal(tensor, b.at(name))) return false;
  }
  return true;
}

TrainerOptions options_for(int64_t step_tokens, int64_t steps) {
  return {.schedule = {.peak = 3e-3, .minimum = 0, .warmup_tokens = 0, .max_tokens = step_tokens * steps},
          .adamw = {},
          .max_grad_norm = 1};
}

// ---- the published rules, step by step (tests/golden/train_*)

fs::path golden_folder() {
  const char* other = std::getenv("FOX_GOLDEN_DIR");
  return other ? fs::path(other) : fs::path(FOX_SOURCE_DIR) / "tests/golden";
}

class Trajectory : public testing::TestWithParam<const char*> {};

TEST_P(Trajectory, FollowsTheSpecificationStepByStep) {
  const fs::path path = golden_folder() / GetParam();
  if (!fs::exists(path)) GTEST_SKIP() << path << " is not there";
  const auto file = checkpoint::read_safetensors(path);
  const auto number = [&](const char* key) { return std::stod(file.metadata.at(key)); };
  const auto& data = file.tensors.at("data");  // (steps, accumulation, B, T)
  const int64_t steps = data.size(0), step_tokens = data[0].numel();
  const auto betas = json::parse(file.metadata.at("betas"));

  model::LanguageModel model(ModelConfig::from_json(json::parse(file.metadata.at("config"))));
  model.to(at::kCPU, at::kDouble);
  NamedTensors into;
  for (const auto& parameter : model.parameters()) into[parameter.name] = parameter.tensor.detach();
  for (const auto& [name, tensor] : into) tensor.copy_(file.tensors.at("w." + name));
  Trainer trainer(model, {.schedule = {number("peak_lr"), 0, std::lround(number("warmup_steps")) * step_tokens,
                                       steps * step_tokens},
                          .adamw = {betas[0], betas[1], number("eps"), number("weight_decay")},
                          .max_grad_norm = number("max_grad_norm")});

  const auto expect = [&](double got, const char* name, int64_t step) {
    const double expected = file.tensors.at(name)[step].item<double>();
    EXPECT_LE(std::abs(got - expected), 1e-8 * std::abs(expected)) << name << ", step " << step;
  };
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<data::Batch> batches;
    for (const auto& labels : data[step].unbind(0)) {
      batches.push_back({at::constant_pad_nd(labels, {1, -1}, 0), labels});  // shifted right, id 0 first
    }
    const auto result = trainer.step(batches);
    EXPECT_EQ(result.step, step + 1);
    EXPECT_EQ(result.tokens, (step + 1) * step_tokens);
    EXPECT_EQ(result.fault, "");
    expect(result.loss, "loss", step);
    expect(result.grad_norm, "grad_norm", step);
    expect(result.lr, "lr", step);
  }
  for (const auto& [name, tensor] : into) {
    const auto& expected = file.tensors.at("final." + name);
    EXPECT_LE((tensor - expected).norm().item<double>(), 1e-8 * expected.norm().item<double>()) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, Trajectory,
                         testing::Values("train_fox_pro.safetensors", "train_transformer_llama.safetensors"),
                         [](const auto& info) {
                           const std::string name = info.param;
                           return name.substr(0, name.find('.'));
                         });

// ---- accumulation weighs tokens (labels that count differ from micro-batch to micro-batch)

TEST(Accumulation, EqualsOneBigBatchHoweverItIsCut) {
  const auto whole = make_batch(6, 20, 1);
  whole.labels_BT[0].fill_(-100);
  whole.labels_BT[1].narrow(0, 3, 17).fill_(-100);
  const auto cut = [&](std::vector<int64_t> rows) {
    std::vector<data::Batch> parts;
    int64_t first = 0;
    for (const int64_t n : rows) {
      parts.push_back({whole.ids_BT.narrow(0, first, n), whole.labels_BT.narrow(0, first, n)});
      first += n;
    }
    return parts;
  };
  const auto run = [&](const std::vector<data::Batch>& batches, NamedTensors& weights) {
    auto model = make_model(small_config(), at::kDouble, at::kDouble);
    Trainer trainer(model, options_for(120, 10));
    StepResult result;
    for (int i = 0; i < 3; ++i) result = trainer.step(batches);
    weights = copy_of(model);
    return result;
  };
  NamedTensors expected;
  const auto reference = run(cut({6}), expected);
  for (const auto& rows : {std::vector<int64_t>{3, 3}, {1, 5}, {2, 1, 3}, {1, 1, 1, 1, 1, 1}}) {
    NamedTensors weights;
    const auto result = run(cut(rows), weights);
    EXPECT_NEAR(result.loss, reference.loss, 1e-12);
    EXPECT_NEAR(result.grad_norm, reference.grad_norm, 1e-10);
    // AdamW divides by √v, so that rounding shows in coordinates whose gradient is next to nothing.
    for (const auto& [name, tensor] : weights) {
      EXPECT_LE((tensor - expected.at(name)).norm().item<double>(), 1e-7 * expected.at(name).norm().item<double>())
          << name;
    }
  }
}

TEST(Accumulation, RefusesAStepWithoutLabels) {
  auto model = make_model(small_config(), at::kFloat, at::kFloat);
  Trainer trainer(model, options_for(40, 10));
  const auto batch = make_batch(2, 20, 1);
  batch.labels_BT.fill_(-100);
  EXPECT_THROW(trainer.step({&batch, 1}), Error);
}

// ---- precision

TEST(Precision, BfloatKeepsFloat32MastersMomentsAndLoss) {
  auto model = make_model(small_config(), at::kFloat, at::kBFloat16);
  auto exact = make_model(small_config(), at::kFloat, at::kFloat);
  Trainer trainer(model, options_for(80, 10)), reference(exact, options_for(80, 10));
  const auto batch = make_batch(4, 20, 1);
  for (int i = 0; i < 5; ++i) {
    const auto result = trainer.step({&batch, 1}), expected = reference.step({&batch, 1});
    // bfloat16 has 8 bits, so a mean of 80 losses is right to a percent; it is not itself rounded to 8 bits.
    EXPECT_NEAR(result.loss / expected.loss, 1, 0.02);
    EXPECT_NEAR(result.grad_norm / expected.grad_norm, 1, 0.1);
    EXPECT_NE(result.loss, static_cast<double>(static_cast<float>(c10::BFloat16(static_cast<float>(result.loss)))));
  }
  for (const auto& parameter : model.parameters()) EXPECT_EQ(parameter.tensor.scalar_type(), at::kFloat);
  for (const auto& [name, tensor] : trainer.tensors()) EXPECT_EQ(tensor.scalar_type(), at::kFloat) << name;
}

// ---- activation checkpointing

TEST(Recompute, TrainsToTheSameBits) {
  for (const auto compute : {at::kFloat, at::kBFloat16}) {
    const auto train = [&](model::Recompute what) {
      auto model = make_model(small_config(), at::kFloat, compute);
      model.set_recompute(what);
      Trainer trainer(model, options_for(80, 10));
      for (int i = 0; i < 3; ++i) {
        const std::vector<data::Batch> batches{make_batch(2, 20, 2 * i), make_batch(2, 20, 2 * i + 1)};
        EXPECT_EQ(trainer.step(batches).fault, "");
      }
      return copy_of(model);
    };
    const auto expected = train(model::Recompute::kNone);
    EXPECT_TRUE(same_bits(train(model::Recompute::kMlp), expected));
    EXPECT_TRUE(same_bits(train(model::Recompute::kFull), expected));
  }
}

// ---- steps that are not finite

struct Poisoned {
  const char* what;
  double value;
};

class NotFinite : public testing::TestWithParam<Poisoned> {};

// A weight of the last layer that is spoilt for one step spoils the loss of that step.
TEST_P(NotFinite, IsNotAppliedAndTheNextStepGoesOn) {
  auto model = make_model(small_config(), at::kFloat, at::kFloat);
  Trainer trainer(model, options_for(80, 10));
  const auto batch = make_batch(4, 20, 1);
  trainer.step({&batch, 1});
  const auto weights = copy_of(model);
  const auto optimizer_steps = trainer.state_json().at("optimizer_steps");
  NamedTensors moments;
  for (const auto& [name, tensor] : trainer.tensors()) moments[name] = tensor.clone();

  const auto spoil = [&](const std::string& name, double value) {
    const at::NoGradGuard no_grad;
    for (const auto& parameter : model.parameters()) {
      if (parameter.name == name) parameter.tensor.flatten()[3].fill_(value);
    }
  };
  for (int i = 1; i <= 3; ++i) {
    spoil("lm_head.weight", GetParam().value);
    const auto result = trainer.step({&batch, 1});
    EXPECT_NE(result.fault.find("loss of micro-batch 1 of 1"), std::string::npos) << result.fault;
    EXPECT_EQ(trainer.state().bad_steps, i);
  }
  EXPECT_EQ(trainer.state().step, 4);
  EXPECT_EQ(trainer.state().tokens, 4 * 80);
  EXPECT_EQ(trainer.state_json().at("optimizer_steps"), optimizer_steps);
  EXPECT_TRUE(same_bits(trainer.tensors(), moments));
  for (const auto& parameter : model.parameters()) {
    if (parameter.name == "lm_head.weight") parameter.tensor.detach().copy_(weights.at(parameter.name));
  }
  EXPECT_TRUE(same_bits(copy_of(model), weights));

  EXPECT_EQ(trainer.step({&batch, 1}).fault, "");
  EXPECT_EQ(trainer.state().bad_steps, 0);
  EXPECT_FALSE(same_bits(copy_of(model), weights));
}

INSTANTIATE_TEST_SUITE_P(Values, NotFinite,
                         testing::Values(Poisoned{"nan", std::nan("")}, Poisoned{"infinity", HUGE_VAL},
                                         Poisoned{"minus_infinity", -HUGE_VAL}),
                         [](const auto& info) { return info.param.what; });

// Wherever in the model the poison is, the step is a bad one and no exception.
TEST(NotFinite, InAnyParameterIsABadStep) {
  const auto batch = make_batch(2, 20, 1);
  auto fresh = make_model(small_config(), at::kFloat, at::kFloat);
  for (size_t i = 0; i < fresh.parameters().size(); ++i) {
    for (const double value : {std::nan(""), HUGE_VAL, 1e38}) {
      auto model = make_model(small_config(), at::kFloat, at::kFloat);
      Trainer trainer(model, options_for(40, 10));
      const auto& parameter = model.parameters()[i];
      parameter.tensor.detach().fill_(value);
      const auto before = copy_of(model);
      StepResult result;
      ASSERT_NO_THROW(result = trainer.step({&batch, 1})) << parameter.name << " = " << value;
      const bool finite = std::isfinite(result.loss) && std::isfinite(result.grad_norm);
      EXPECT_EQ(result.fault.empty(), finite) << parameter.name << " = " << value << ": " << result.fault;
      if (finite) continue;
      for (const auto& other : model.parameters()) {
        if (other.name == parameter.name) continue;
        EXPECT_TRUE(at::equal(other.tensor, before.at(other.name))) << other.name;
      }
    }
  }
}

// A step that is begun while the one before it, which is not finite, has not been looked at yet.
TEST(NotFinite, IsKeptOutAlsoOfStepsBegunMeanwhile) {
  const auto good = make_batch(4, 20, 1), bad = make_batch(4, 20, 2);
  bool poison = false;
  const auto run = [&](bool with_bad, bool at_once) {
    auto model = make_model(small_config(), at::kFloat, at::kFloat);
    Trainer trainer(model, {.schedule = {.peak = 3e-3, .minimum = 3e-3}, .adamw = {}, .max_grad_norm = 1});
    for (const auto& parameter : model.parameters()) {
      if (parameter.name != "model.layers.1.mlp.down_proj.weight") continue;
      parameter.tensor.register_hook(
          [&](const at::Tensor& gradient) { return poison ? gradient * HUGE_VAL : gradient; });
    }
    std::vector<std::string> faults;
    const auto begin = [&](const data::Batch& batch, bool spoilt) {
      poison = spoilt;
      trainer.begin_step({&batch, 1});
      if (at_once) faults.push_back(trainer.finish_step().fault);
    };
    begin(good, false);
    if (with_bad) begin(bad, true);
    begin(good, false);
    EXPECT_EQ(trainer.pending(), at_once ? 0 : 3);
    while (trainer.pending() > 0) faults.push_back(trainer.finish_step().fault);
    EXPECT_EQ(trainer.state().tokens, 80 * std::ssize(faults));
    EXPECT_EQ(faults[1].empty(), !with_bad);
    return copy_of(model);
  };
  const auto expected = run(false, true);
  EXPECT_TRUE(same_bits(run(true, true), expected));
  EXPECT_TRUE(same_bits(run(true, false), expected));
}

TEST(NotFinite, ABadGradientIsNamed) {
  auto model = make_model(small_config(), at::kFloat, at::kFloat);
  Trainer trainer(model, options_for(80, 10));
  const auto before = copy_of(model);
  // The loss is finite, one gradient is not.
  for (const auto& parameter : model.parameters()) {
    if (parameter.name == "model.layers.1.mlp.down_proj.weight") {
      parameter.tensor.register_hook([](const at::Tensor& gradient) { return gradient * HUGE_VAL; });
    }
  }
  const auto batch = make_batch(4, 20, 1);
  const auto result = trainer.step({&batch, 1});
  EXPECT_TRUE(std::isfinite(result.loss));
  EXPECT_NE(result.fault.find("model.layers.1.mlp.down_proj.weight"), std::string::npos) << result.fault;
  EXPECT_TRUE(same_bits(copy_of(model), before));
}

// ---- stopped and continued

TEST(Restore, GoesOnBitForBit) {
  const auto steps = [](Trainer& trainer, int from, int to) {
    std::vector<double> losses;
    for (int i = from; i < to; ++i) {
      const std::vector<data::Batch> batches{make_batch(2, 20, 2 * i), make_batch(2, 20, 2 * i + 1)};
      losses.push_back(trainer.step(batches).loss);
    }
    return losses;
  };
  auto undisturbed = make_model(small_config(), at::kFloat, at::kFloat);
  Trainer whole(undisturbed, options_for(80, 20));
  const auto losses = steps(whole, 0, 20);

  auto first = make_model(small_config(), at::kFloat, at::kFloat);
  Trainer before(first, options_for(80, 20));
  steps(before, 0, 9);

  auto second = make_model(small_config(), at::kFloat, at::kFloat);
  for (const auto& parameter : second.parameters()) parameter.tensor.detach().fill_(99);
  NamedTensors into;
  for (const auto& parameter : second.parameters()) into[parameter.name] = parameter.tensor.detach();
  Trainer after(second, options_for(80, 20));
  checkpoint::load_into(copy_of(first), into, "weights");
  after.restore(before.state_json(), before.tensors(), "state");
  EXPECT_EQ(steps(after, 9, 20), std::vector<double>(losses.begin() + 9, losses.end()));
  EXPECT_TRUE(same_bits(copy_of(second), copy_of(undisturbed)));
  EXPECT_TRUE(same_bits(after.tensors(), whole.tensors()));
}

TEST(Restore, RefusesWhatIsNotATrainersState) {
  auto model = make_model(small_config(), at::kFloat, at::kFloat);
  Trainer trainer(model, options_for(80, 20));
  EXPECT_THROW(trainer.restore(json{{"step", 1}}, trainer.tensors(), "state"), Error);
  EXPECT_THROW(trainer.restore(json{{"step", "x"}, {"tokens", 1}, {"bad_steps", 0}, {"optimizer_steps", 1}},
                               trainer.tensors(), "state"),
               Error);
  EXPECT_THROW(trainer.restore(trainer.state_json(), {}, "state"), Error);
}

// ---- steps that are repeated as a graph, here one of the host's that only looks on

struct GraphLog {
  const model::LanguageModel* model = nullptr;
  std::vector<std::string> calls;
  int64_t version_at_record = 0;  ///< of the first parameter
  std::string report;             ///< what kernels will have found
};
GraphLog graph_log;

class LookingOn : public ops::DeviceGraph {
 public:
  void run(const std::function<void()>& work) override {
    graph_log.calls.emplace_back("run");
    work();
  }
  void record(const std::function<void()>& work) override {
    graph_log.calls.emplace_back("record");
    graph_log.version_at_record = graph_log.model->parameters().front().tensor._version();
    work();
    recorded_ = true;
  }
  bool recorded() const override { return recorded_; }
  void replay() override { graph_log.calls.emplace_back("replay"); }
  std::string take_report() override { return std::exchange(graph_log.report, ""); }

 private:
  bool recorded_ = false;
};

class RepeatedSteps : public testing::Test {
 protected:
  RepeatedSteps() : model_(make_model(small_config(), at::kFloat, at::kFloat)), trainer_(make_trainer()) {}
  ~RepeatedSteps() override { ops::register_device_graph(nullptr); }
  Trainer make_trainer() {
    graph_log = {};
    graph_log.model = &model_;
    ops::register_device_graph(
        [](at::Device) -> std::unique_ptr<ops::DeviceGraph> { return std::make_unique<LookingOn>(); });
    auto options = options_for(80, 100);
    options.graph = true;
    return {model_, options};
  }
  StepResult step(int64_t length = 20) { return trainer_.step(std::vector{make_batch(4, length, ++seed_)}); }
  int64_t version() const { return model_.parameters().front().tensor._version(); }

  model::LanguageModel model_;
  Trainer trainer_;
  uint64_t seed_ = 0;
};

// Casts of weights that an evaluation has made after the step before would else not be made in the recorded step, nor
// in any that repeats it.
TEST_F(RepeatedSteps, WeightsCountAsChangedBeforeTheRecordAndAfterEachReplay) {
  ASSERT_TRUE(trainer_.repeats_steps());
  step();
  step();
  const int64_t before = version();
  step();
  EXPECT_GT(graph_log.version_at_record, before);
  const int64_t recorded = version();
  step();
  EXPECT_GT(version(), recorded);
  EXPECT_EQ(graph_log.calls, (std::vector<std::string>{"run", "run", "record", "replay", "replay"}));
}

TEST_F(RepeatedSteps, AStepOfAnotherShapeIsTakenAsItIs) {
  for (int i = 0; i < 3; ++i) step();
  const auto calls = graph_log.calls.size();
  const auto before = copy_of(model_);
  step(10);
  EXPECT_EQ(graph_log.calls.size(), calls);
  EXPECT_FALSE(same_bits(before, copy_of(model_)));
}

TEST_F(RepeatedSteps, AskingToStopNeedsNoRecord) {
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(step().stop);
  trainer_.ask_to_stop();
  EXPECT_TRUE(step().stop);
}

// A replay throws nothing: what kernels found is told with the step that turns out not to be finite, which may be the
// one after.
TEST_F(RepeatedSteps, WhatKernelsFoundIsToldWithTheStepThatFailed) {
  step();
  graph_log.report = "log_f[0, 1, 2] is NaN";
  EXPECT_EQ(step().fault, "");
  {
    const at::NoGradGuard no_grad;
    model_.parameters().back().tensor.fill_(std::nan(""));  // of the head: no gate is at fault
  }
  trainer_.begin_step(std::vector{make_batch(4, 10, 7)});
  const auto fault = trainer_.finish_step().fault;
  EXPECT_NE(fault.find("is nan"), std::string::npos) << fault;
  EXPECT_NE(fault.find("log_f[0, 1, 2] is NaN"), std::string::npos) << fault;
}

}  // namespace
}  // namespace fox::train
