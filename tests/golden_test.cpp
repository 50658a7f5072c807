// One case a file of expected values (tests/golden, or the folder FOX_GOLDEN_DIR): operators (op_*), models (model_*)
// and whole training trajectories (train_*), in float64 and in float32. tests/spec/make_golden.py writes such files.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/hf_directory.h"
#include "model/language_model.h"
#include "ops/forgetting_attn.h"
#include "support/errors.h"
#include "support/naive_model.h"

namespace fox {
namespace {

namespace fs = std::filesystem;
using checkpoint::NamedTensors;
using checkpoint::SafetensorsFile;
using nlohmann::json;
using test::expect_as_good_as_naive;
using test::expect_close;

constexpr double kFloat64 = 1e-10;    // of values that one pass computes
constexpr double kTrajectory = 1e-8;  // of values after many optimizer steps

// The tensors whose names begin with `prefix`, without it.
NamedTensors with_prefix(const SafetensorsFile& file, const std::string& prefix) {
  NamedTensors result;
  for (const auto& [name, tensor] : file.tensors) {
    if (name.starts_with(prefix)) result[name.substr(prefix.size())] = tensor;
  }
  return result;
}

// ---- operators

struct OpValues {
  at::Tensor o, dq, dk, dv, dlog_f;
  double largest_lse = 0;
};

template <typename Op>
OpValues run_op(const Op& op, const SafetensorsFile& file, at::ScalarType dtype) {
  const auto leaf = [&](const char* name) { return file.tensors.at(name).to(dtype).requires_grad_(true); };
  std::vector<at::Tensor> inputs{leaf("q"), leaf("k"), leaf("v")};
  std::optional<at::Tensor> log_f;
  if (file.tensors.contains("log_f")) inputs.push_back(log_f.emplace(leaf("log_f")));
  ops::ForgettingAttnOptions options;
  if (const auto& scale = file.metadata.at("scale"); scale != "default") options.scale = std::stod(scale);
  if (const auto& window = file.metadata.at("window"); window != "none") options.window = std::stoll(window);
  if (file.tensors.contains("seq_start")) options.seq_start = file.tensors.at("seq_start");
  const auto result = op(inputs[0], inputs[1], inputs[2], log_f, options);
  const auto grads = torch::autograd::grad({result.o_BTHD}, inputs, {file.tensors.at("do").to(dtype)});
  const at::Tensor lse = result.lse_BHT;
  return {result.o_BTHD,
          grads[0],
          grads[1],
          grads[2],
          log_f ? grads[3] : at::Tensor(),
          at::where(lse.isfinite(), lse, 0.0).abs().max().template item<double>()};
}

// Files made without exact resets put -1e9 in the place of -inf and sum it up: their values carry that sum's rounding.
double float64_tolerance(const SafetensorsFile& file) {
  if (!file.tensors.contains("log_f") || file.metadata.contains("exact_resets")) return kFloat64;
  const auto resets = at::isinf(file.tensors.at("log_f")).sum(1).max().item<int64_t>();
  return kFloat64 + std::numeric_limits<double>::epsilon() * 1e9 * static_cast<double>(resets);
}

double longest(const at::Tensor& x_BTHD) { return x_BTHD.norm(2, -1).max().item<double>(); }

void check_op(const SafetensorsFile& file) {
  const auto ours = run_op(ops::forgetting_attn, file, at::kDouble);
  const auto ours32 = run_op(ops::forgetting_attn, file, at::kFloat);
  const auto naive32 = run_op(ops::forgetting_attn_reference, file, at::kFloat);
  constexpr double kEps = std::numeric_limits<float>::epsilon();
  // Logits are scaled once more, to base 2, and the backward pass computes P = exp(s - LSE) from a LSE that was rounded
  // to float32: errors of the exponent as large as its last place.
  const double exponent = kEps * ours.largest_lse;
  // dS = P (dP - Δ) is a difference of terms as large as |do| |v|. They cancel to nothing where a row sees one key
  // only: what float32 leaves of them is no error of dlog_f, nor, times a key or query, of dq and dk.
  const double ds_rounding = kEps * longest(file.tensors.at("do")) * longest(file.tensors.at("v"));
  const auto& q = file.tensors.at("q");
  const auto& scale_text = file.metadata.at("scale");
  const double scale = scale_text == "default" ? 1 / std::sqrt(static_cast<double>(q.size(3))) : std::stod(scale_text);
  const double dqk_rounding = ds_rounding * scale * std::max(longest(q), longest(file.tensors.at("k")));
  const auto check = [&](const std::string& name, at::Tensor OpValues::*value, double relative, double absolute) {
    const auto it = file.tensors.find(name);
    if (it == file.tensors.end()) return;
    expect_close(ours.*value, it->second, float64_tolerance(file), 1e-14, name + " in float64");
    expect_as_good_as_naive(ours32.*value, naive32.*value, it->second, name + " in float32", relative, absolute);
  };
  check("o", &OpValues::o, exponent, 0);
  check("dq", &OpValues::dq, exponent, dqk_rounding);
  check("dk", &OpValues::dk, exponent, dqk_rounding);
  check("dv", &OpValues::dv, exponent, 0);
  check("dlog_f", &OpValues::dlog_f, exponent, ds_rounding);
  if (!file.tensors.contains("log_f")) return;
  // A gate of -inf is a limit: whatever flows back through it is 0, and everything else is finite.
  const auto reset = at::isinf(file.tensors.at("log_f"));
  for (const auto* values : {&ours, &ours32}) {
    EXPECT_TRUE(values->dlog_f.isfinite().all().item<bool>());
    EXPECT_EQ(values->dlog_f.masked_select(reset).count_nonzero().item<int64_t>(), 0);
  }
}

// ---- models

// Nothing when the file's model_type is not built.
std::optional<ModelConfig> built_config(const SafetensorsFile& file) {
  const auto config = json::parse(file.metadata.at("config"));
  if (!ModelConfig::is_built(config.at("model_type").get<std::string>())) return std::nullopt;
  return ModelConfig::from_json(config, "config");
}

model::LanguageModel load_model(const ModelConfig& config, const NamedTensors& weights, at::ScalarType dtype) {
  model::LanguageModel model(config);
  model.to(at::kCPU, dtype);
  NamedTensors into;
  for (const auto& parameter : model.parameters()) into.emplace(parameter.name, parameter.tensor);
  checkpoint::load_into(weights, into, "golden file");
  model.set_requires_grad(true);
  return model;
}

// The weights as leaves of the naive model.
NamedTensors leaves(const NamedTensors& weights, at::ScalarType dtype) {
  NamedTensors result;
  for (const auto& [name, tensor] : weights) result[name] = tensor.to(dtype, false, /*copy=*/true).requires_grad_(true);
  return result;
}

at::Tensor grad_or_zero(const at::Tensor& tensor) {
  return tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor);
}

struct ModelValues {
  at::Tensor logits, loss;
  NamedTensors grads;
};

ModelValues run_model(const ModelConfig& config, const SafetensorsFile& file, at::ScalarType dtype) {
  auto model = load_model(config, with_prefix(file, "w."), dtype);
  const auto &ids = file.tensors.at("input_ids"), &labels = file.tensors.at("labels");
  const auto loss = model.loss(ids, labels);
  loss.total.backward();
  ModelValues values{model.logits(ids).detach(), loss.loss_BT, {}};
  for (const auto& parameter : model.parameters()) {
    if (parameter.trainable) values.grads[parameter.name] = grad_or_zero(parameter.tensor);
  }
  return values;
}

ModelValues run_naive_model(const SafetensorsFile& file, at::ScalarType dtype) {
  const auto config = json::parse(file.metadata.at("config"));
  const auto weights = leaves(with_prefix(file, "w."), dtype);
  const auto &ids = file.tensors.at("input_ids"), &labels = file.tensors.at("labels");
  const auto loss = naive::loss_per_token(config, weights, ids, labels);
  loss.mean().backward();
  ModelValues values{naive::logits(config, weights, ids).detach(), loss.detach(), {}};
  for (const auto& [name, tensor] : weights) values.grads[name] = grad_or_zero(tensor);
  return values;
}

void check_model(const SafetensorsFile& file, const ModelConfig& config) {
  const auto ours = run_model(config, file, at::kDouble), ours32 = run_model(config, file, at::kFloat);
  const auto naive32 = run_naive_model(file, at::kFloat);
  expect_close(ours.logits, file.tensors.at("logits"), kFloat64, 0, "logits in float64");
  expect_close(ours.loss, file.tensors.at("loss"), kFloat64, 0, "loss in float64");
  expect_as_good_as_naive(ours32.logits, naive32.logits, file.tensors.at("logits"), "logits in float32");
  expect_as_good_as_naive(ours32.loss, naive32.loss, file.tensors.at("loss"), "loss in float32");
  const auto grads = with_prefix(file, "grad.");
  for (const auto& [name, expected] : grads) {
    ASSERT_TRUE(ours.grads.contains(name)) << name << " has no gradient";
    expect_close(ours.grads.at(name), expected, kFloat64, 1e-16, "gradient of " + name + " in float64");
    expect_as_good_as_naive(ours32.grads.at(name), naive32.grads.at(name), expected,
                            "gradient of " + name + " in float32");
  }
  for (const auto& [name, grad] : ours.grads) {
    const bool unused = grad.count_nonzero().item<int64_t>() == 0;  // lower bounds that are not applied
    EXPECT_TRUE(grads.contains(name) || unused) << name << " is learnt here but not there";
  }
}

// ---- training

/// The rules of a trajectory file, in the order in which its numbers were computed.
struct Recipe {
  explicit Recipe(const SafetensorsFile& file)
      : peak_lr(std::stod(file.metadata.at("peak_lr"))),
        warmup(std::stoll(file.metadata.at("warmup_steps"))),
        steps(std::stoll(file.metadata.at("steps"))),
        accumulation(std::stoll(file.metadata.at("grad_accumulation"))),
        weight_decay(std::stod(file.metadata.at("weight_decay"))),
        eps(std::stod(file.metadata.at("eps"))),
        max_norm(std::stod(file.metadata.at("max_grad_norm"))) {
    const auto betas = json::parse(file.metadata.at("betas"));
    beta1 = betas[0], beta2 = betas[1];
  }
  double lr(int64_t step) const {
    if (step < warmup) return peak_lr * static_cast<double>(step) / static_cast<double>(warmup);
    const double done = static_cast<double>(step - warmup) / static_cast<double>(steps - warmup);
    return peak_lr * 0.5 * (1 + std::cos(M_PI * done));
  }
  double peak_lr;
  int64_t warmup, steps, accumulation;
  double weight_decay, eps, max_norm, beta1 = 0, beta2 = 0;
};

// AdamW, written out: nothing of the trainer's is used here.
class PlainAdamW {
 public:
  PlainAdamW(nn::Parameters parameters, const Recipe& recipe) : parameters_(std::move(parameters)), recipe_(recipe) {
    for (const auto& parameter : parameters_) {
      mean_.push_back(at::zeros_like(parameter.tensor));
      square_.push_back(at::zeros_like(parameter.tensor));
    }
  }

  // Returns the global gradient norm before clipping.
  double step(double lr) {
    at::NoGradGuard no_grad;
    ++count_;
    double sum = 0;
    for (auto& parameter : parameters_) sum += parameter.tensor.grad().to(at::kDouble).square().sum().item<double>();
    const double norm = std::sqrt(sum), scale = std::min(1.0, recipe_.max_norm / (norm + 1e-6));
    const double t = static_cast<double>(count_);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      auto& theta = parameters_[i].tensor;
      const auto grad = theta.grad() * scale;
      if (parameters_[i].decay) theta.mul_(1 - lr * recipe_.weight_decay);
      mean_[i].mul_(recipe_.beta1).add_(grad, 1 - recipe_.beta1);
      square_[i].mul_(recipe_.beta2).addcmul_(grad, grad, 1 - recipe_.beta2);
      const auto denominator = (square_[i] / (1 - std::pow(recipe_.beta2, t))).sqrt_().add_(recipe_.eps);
      theta.addcdiv_(mean_[i], denominator, -lr / (1 - std::pow(recipe_.beta1, t)));
      theta.mutable_grad() = at::Tensor();
    }
    return norm;
  }

 private:
  nn::Parameters parameters_;
  Recipe recipe_;
  std::vector<at::Tensor> mean_, square_;
  int64_t count_ = 0;
};

struct Trajectory {
  std::vector<double> loss, grad_norm;
  NamedTensors final;
};

// `loss` maps (ids, labels) to the mean loss.
Trajectory train(const SafetensorsFile& file, const nn::Parameters& parameters,
                 const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& loss) {
  const Recipe recipe(file);
  PlainAdamW optimizer(parameters, recipe);
  const auto& data = file.tensors.at("data");  // (steps, accumulation, B, T)
  Trajectory trajectory;
  for (int64_t step = 0; step < recipe.steps; ++step) {
    double total = 0;
    for (int64_t micro = 0; micro < recipe.accumulation; ++micro) {
      const auto labels = data[step][micro];
      const auto ids = at::cat({at::zeros_like(labels.narrow(1, 0, 1)), labels.narrow(1, 0, labels.size(1) - 1)}, 1);
      const auto share = loss(ids, labels) / recipe.accumulation;
      share.backward();
      total += share.item<double>();
    }
    trajectory.loss.push_back(total);
    trajectory.grad_norm.push_back(optimizer.step(recipe.lr(step)));
  }
  for (const auto& parameter : parameters) trajectory.final[parameter.name] = parameter.tensor.detach();
  return trajectory;
}

Trajectory train_model(const SafetensorsFile& file, const ModelConfig& config, at::ScalarType dtype) {
  auto model = load_model(config, with_prefix(file, "w."), dtype);
  return train(file, model.parameters(),
               [&](const auto& ids, const auto& labels) { return model.loss(ids, labels).total; });
}

Trajectory train_naive_model(const SafetensorsFile& file, const ModelConfig& config, at::ScalarType dtype) {
  const auto weights = leaves(with_prefix(file, "w."), dtype);
  auto parameters = model::LanguageModel(config).parameters();
  for (auto& parameter : parameters) parameter.tensor = weights.at(parameter.name);
  const auto raw = json::parse(file.metadata.at("config"));
  return train(file, parameters, [&](const auto& ids, const auto& labels) {
    return naive::loss_per_token(raw, weights, ids, labels).mean();
  });
}

void check_training(const SafetensorsFile& file, const ModelConfig& config) {
  const Recipe recipe(file);
  const auto ours = train_model(file, config, at::kDouble), ours32 = train_model(file, config, at::kFloat);
  const auto naive32 = train_naive_model(file, config, at::kFloat);
  const auto loss = file.tensors.at("loss"), norm = file.tensors.at("grad_norm"), lr = file.tensors.at("lr");
  // Rounding errors grow from step to step and are now larger, now smaller: what has been seen so far is allowed.
  double worst_loss = 0, worst_norm = 0;
  const auto relative = [](double got, double expected) { return std::abs(got - expected) / std::abs(expected); };
  for (int64_t step = 0; step < recipe.steps; ++step) {
    const double expected_loss = loss[step].item<double>(), expected_norm = norm[step].item<double>();
    EXPECT_NEAR(recipe.lr(step), lr[step].item<double>(), 1e-15) << "step " << step;
    EXPECT_LE(relative(ours.loss[step], expected_loss), kTrajectory) << "loss, step " << step;
    EXPECT_LE(relative(ours.grad_norm[step], expected_norm), kTrajectory) << "gradient norm, step " << step;
    worst_loss = std::max(worst_loss, relative(naive32.loss[step], expected_loss));
    worst_norm = std::max(worst_norm, relative(naive32.grad_norm[step], expected_norm));
    EXPECT_LE(relative(ours32.loss[step], expected_loss), 2 * worst_loss + 1e-6) << "float32 loss, step " << step;
    EXPECT_LE(relative(ours32.grad_norm[step], expected_norm), 2 * worst_norm + 1e-6) << "float32 norm, step " << step;
  }
  for (const auto& [name, expected] : with_prefix(file, "final.")) {
    if (!ours.final.contains(name)) continue;
    expect_close(ours.final.at(name), expected, kTrajectory, 0, name + " at the end, in float64");
    const double allowed = 2 * test::distance(naive32.final.at(name), expected).l2 + 1e-6;
    EXPECT_LE(test::distance(ours32.final.at(name), expected).l2, allowed) << name << " at the end, in float32";
  }
}

// ---- one case a file

class GoldenFile : public testing::Test {
 public:
  explicit GoldenFile(fs::path path) : path_(std::move(path)) {}

  void TestBody() override {
    const auto file = checkpoint::read_safetensors(path_);
    const auto name = path_.stem().string();
    if (name.starts_with("op_")) return check_op(file);
    ASSERT_TRUE(name.starts_with("model_") || name.starts_with("train_")) << "unknown kind of file: " << path_;
    const auto config = built_config(file);
    if (!config) GTEST_SKIP() << "model_type is not built: " << file.metadata.at("config");
    name.starts_with("model_") ? check_model(file, *config) : check_training(file, *config);
  }

 private:
  fs::path path_;
};

class NoGoldenFiles : public testing::Test {
 public:
  explicit NoGoldenFiles(fs::path folder) : folder_(std::move(folder)) {}
  void TestBody() override { FAIL() << "no *.safetensors file in " << folder_; }

 private:
  fs::path folder_;
};

// Before main, so that --gtest_filter and --gtest_list_tests see the cases.
const bool registered = [] {
  const char* named = std::getenv("FOX_GOLDEN_DIR");
  const fs::path folder = named && *named ? fs::path(named) : fs::path(FOX_SOURCE_DIR) / "tests/golden";
  std::vector<fs::path> files;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    testing::RegisterTest("Golden", path.stem().c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          [path]() -> testing::Test* { return new GoldenFile(path); });
  }
  if (files.empty()) {
    testing::RegisterTest("Golden", "files_are_there", nullptr, nullptr, __FILE__, __LINE__,
                          [folder]() -> testing::Test* { return new NoGoldenFiles(folder); });
  }
  return true;
}();

}  // namespace
}  // namespace fox
