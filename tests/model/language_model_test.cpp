#include "model/language_model.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "ops/forgetting_attn.h"
#include "support/errors.h"
#include "support/small_models.h"

namespace fox::model {
namespace {

using nlohmann::json;
using test::small_config;

const json kPro{{"use_k_shift", true},     {"use_v_shift", true},
                {"qk_norm", true},         {"qk_norm_share_param_across_head", true},
                {"use_output_gate", true}, {"use_output_norm", true},
                {"hidden_ratio", 3.5}};

struct Size {
  int64_t layers, width, fox_heads, heads;
};
constexpr Size k125M{12, 768, 12, 12}, k360M{24, 1024, 16, 16}, k760M{24, 1536, 24, 12};

LanguageModel published(const std::string& kind, bool pro, const Size& size, json more = json::object()) {
  json config{{"model_type", kind + "-project_fox"},
              {"hidden_size", size.width},
              {"num_hidden_layers", size.layers},
              {"num_heads", kind == "transformer" || more.contains("fgate_type") ? size.heads : size.fox_heads}};
  if (pro) config.update(kPro);
  config.update(more);
  // The parameters are never filled: memory that is not touched costs nothing.
  return LanguageModel(ModelConfig::from_json(config));
}

json sized(const std::string& kind, const Size& size, const json& more) {
  json config{{"model_type", kind + "-project_fox"}, {"hidden_size", size.width}, {"num_hidden_layers", size.layers}};
  config.update(more);
  return config;
}
json hgrn2(const Size& size) { return sized("hgrn2", size, {{"expand_ratio", 128}}); }
json delta_net(const Size& size) { return sized("delta_net", size, {{"num_heads", size.width / 128}}); }
// A Mamba-2 layer has no MLP, so that twice as many make up a model of the same size.
json mamba2(const Size& size) {
  return sized(
      "mamba2", size,
      {{"num_hidden_layers", 2 * size.layers}, {"num_heads", size.width / 32}, {"state_size", 128}, {"n_groups", 1}});
}
json samba(const Size& size) {
  const json attn{{"layers", nullptr}, {"num_heads", 12}, {"num_kv_heads", nullptr}, {"window_size", 2048}};
  return sized("samba", size, {{"attn", attn}, {"intermediate_size", 2 * size.width}});
}

// arXiv 2503.02130, Table 6, to the last parameter; N leaves out the input embedding of 50257 x width.
TEST(LanguageModel, CountsThePublishedParameters) {
  const json no_gate{{"fgate_type", "none"}, {"use_rope", true}};
  const auto check = [](const LanguageModel& model, int64_t expected) {
    const auto count = model.count_parameters();
    EXPECT_EQ(count.non_embedding, expected);
    EXPECT_EQ(count.total, expected + 50257 * model.config().hidden_size);
  };
  const std::string fox = "forgetting_transformer";
  check(published(fox, true, k125M), 123'893'904);
  check(published(fox, true, k360M), 367'293'824);
  check(published(fox, true, k760M), 759'441'984);
  check(published(fox, true, k125M, no_gate), 123'783'168);
  check(published(fox, true, k360M, no_gate), 366'900'224);
  check(published(fox, true, k760M, no_gate), 757'675'008);
  check(published(fox, false, k125M), 123'661'968);
  check(published(fox, false, k360M), 360'188'288);
  check(published(fox, false, k760M), 757'632'576);
  check(published("transformer", false, k125M), 123'551'232);
  check(published("transformer", false, k360M), 359'794'688);
  check(published("transformer", false, k760M), 756'747'264);
}

TEST(LanguageModel, CountsTheParametersOfTheComparisonSystems) {
  const auto check = [](const json& config, int64_t expected) {
    EXPECT_EQ(LanguageModel(ModelConfig::from_json(config)).count_parameters().non_embedding, expected) << config;
  };
  check(hgrn2(k125M), 123'569'664);
  check(hgrn2(k360M), 359'843'840);
  check(hgrn2(k760M), 756'820'992);
  check(delta_net(k125M), 123'718'656);
  check(delta_net(k360M), 360'289'280);
  check(delta_net(k760M), 757'635'072);
  check(mamba2(k125M), 128'965'824);
  check(mamba2(k360M), 368'314'880);
  check(mamba2(k760M), 780'113'664);
}

TEST(LanguageModel, CountsThePublishedFlops) {
  const auto check = [](const LanguageModel& model, double expected) {
    EXPECT_NEAR(model.flops_per_token(16384), expected, 0.01e9);
  };
  check(published("forgetting_transformer", true, k760M), 2.727e9);  // printed as 2.72e9
  check(published("forgetting_transformer", false, k760M), 2.72e9);
  check(published("transformer", false, k760M), 2.72e9);
  check(LanguageModel(ModelConfig::from_json(hgrn2(k760M))), 1.54e9);
  check(LanguageModel(ModelConfig::from_json(delta_net(k760M))), 1.54e9);
  check(LanguageModel(ModelConfig::from_json(mamba2(k760M))), 1.65e9);
  // A window of w keys is 4 w d a layer and token once the context is long.
  const auto windowed = published("transformer", false, k760M, {{"window_size", 2048}});
  const double n = 2.0 * static_cast<double>(windowed.count_parameters().non_embedding);
  EXPECT_NEAR(windowed.flops_per_token(1 << 30), n + 24 * 4.0 * 2048 * 1536, 1e4);
}

TEST(LanguageModel, TiedEmbeddingsAreOneParameter) {
  auto config = small_config("transformer", {{"tie_word_embeddings", true}});
  const LanguageModel tied(ModelConfig::from_json(config));
  config["tie_word_embeddings"] = false;
  const LanguageModel untied(ModelConfig::from_json(config));
  for (const auto& parameter : tied.parameters()) EXPECT_NE(parameter.name, "lm_head.weight");
  EXPECT_EQ(untied.count_parameters().total - tied.count_parameters().total, 41 * 32);
  EXPECT_EQ(tied.flops_per_token(64), untied.flops_per_token(64));

  auto model = test::random_model({"tied", small_config("transformer", {{"tie_word_embeddings", true}})}, 1);
  model.set_requires_grad(true);
  const auto ids = at::arange(12).view({1, 12});
  const auto logits = model.logits(ids), hidden = model.hidden(ids);
  const auto& embedding = model.parameters().front().tensor;
  test::expect_close(logits, at::matmul(hidden, embedding.t()), 1e-13, 0, "logits");
  // Both uses send their gradient: a row that is neither read nor predicted still gets that of the softmax.
  model.loss(ids, ids + 1).total.backward();
  EXPECT_GT(embedding.grad()[40].abs().max().item<double>(), 0);
}

TEST(LanguageModel, InitialisesAsPublished) {
  auto config = small_config("forgetting_transformer", kPro);
  config.update(json{{"hidden_size", 256}, {"num_heads", 4}, {"vocab_size", 512}, {"initializer_range", 0.02}});
  LanguageModel model(ModelConfig::from_json(config));
  model.init(5);
  for (const auto& parameter : model.parameters()) {
    const auto x = parameter.tensor.to(at::kDouble);
    const bool norm = parameter.name.ends_with("norm.weight"), bias = parameter.name.ends_with("bias");
    if (norm || bias) {
      EXPECT_TRUE(at::all(x == (norm ? 1 : 0)).item<bool>()) << parameter.name;
      EXPECT_FALSE(parameter.decay) << parameter.name;
      continue;
    }
    EXPECT_TRUE(parameter.decay) << parameter.name;
    // Five standard errors of the mean and of the standard deviation of n normal draws.
    const double n = static_cast<double>(x.numel());
    EXPECT_LE(std::abs(x.mean().item<double>()), 5 * 0.02 / std::sqrt(n)) << parameter.name;
    EXPECT_NEAR(x.std().item<double>(), 0.02, 5 * 0.02 / std::sqrt(2 * n)) << parameter.name;
  }
}

// A uniform distribution on ±bound: nothing outside, and the spread that belongs to it.
void expect_uniform(const at::Tensor& x, double bound, const std::string& what) {
  EXPECT_LE(x.abs().max().item<double>(), bound * (1 + 1e-6)) << what;
  const double n = static_cast<double>(x.numel());
  EXPECT_NEAR(x.to(at::kDouble).std().item<double>(), bound / std::sqrt(3.0), 5 * bound / std::sqrt(n)) << what;
}
void expect_normal(const at::Tensor& x, double std, const std::string& what) {
  EXPECT_NEAR(x.to(at::kDouble).std().item<double>(), std, 5 * std / std::sqrt(2.0 * x.numel())) << what;
}

TEST(LanguageModel, Hgrn2InitialisesAsPublished) {
  LanguageModel model(ModelConfig::from_json(small_config("hgrn2", {{"hidden_size", 128}, {"expand_ratio", 64}})));
  model.init(5);
  for (const auto& [name, x, decay, trainable] : model.parameters()) {
    if (name.ends_with("norm.weight")) {
      EXPECT_TRUE(at::all(x == 1).item<bool>()) << name;
    } else if (name.ends_with("lower_bounds")) {
      EXPECT_TRUE(at::all(x == 0).item<bool>());
      EXPECT_FALSE(decay);
    } else if (name.find(".attn.") != std::string::npos) {
      expect_uniform(x, std::pow(2.0, -2.5) * std::sqrt(6.0 / 256), name);
    } else {
      expect_normal(x, name.ends_with("down_proj.weight") ? 0.02 / 2 : 0.02, name);  // √(2 · 2 layers) = 2
    }
  }
}

TEST(LanguageModel, DeltaNetInitialisesAsPublished) {
  LanguageModel model(ModelConfig::from_json(small_config("delta_net", {{"hidden_size", 128}, {"num_heads", 2}})));
  model.init(5);
  for (const auto& [name, x, decay, trainable] : model.parameters()) {
    EXPECT_EQ(decay, !name.ends_with("norm.weight")) << name;
    if (name.find("conv1d") != std::string::npos) {
      expect_uniform(x, 0.5, name);  // four taps
    } else if (name.ends_with("b_proj.weight")) {
      expect_uniform(x, std::pow(2.0, -2.5) * std::sqrt(6.0 / 130), name);
    } else if (name.find(".attn.") != std::string::npos && x.dim() == 2) {
      expect_uniform(x, std::pow(2.0, -2.5) * std::sqrt(6.0 / 256), name);
    } else if (x.dim() == 2) {
      expect_normal(x, name.ends_with("down_proj.weight") ? 0.02 / 2 : 0.02, name);
    }
  }
}

// exp(b) in the limits, softplus inverted.
void expect_time_steps(const at::Tensor& bias, const std::string& what) {
  const auto dt = at::softplus(bias.to(at::kDouble));
  EXPECT_GE(dt.min().item<double>(), 0.999e-3) << what;
  EXPECT_LE(dt.max().item<double>(), 0.1001) << what;
  EXPECT_NEAR(dt.log().mean().item<double>(), std::log(1e-2), 5 * std::log(100.0) / std::sqrt(12.0 * bias.numel()));
}

TEST(LanguageModel, Mamba2InitialisesAsPublished) {
  LanguageModel model(ModelConfig::from_json(test::small_mamba2_config(
      {{"hidden_size", 128}, {"num_heads", 64}, {"head_dim", 4}, {"initializer_range", 0.02}})));
  model.init(5);
  for (const auto& [name, x, decay, trainable] : model.parameters()) {
    EXPECT_EQ(decay, x.dim() > 1) << name;
    if (name.ends_with("norm.weight") || name.ends_with("norm_f.weight") || name.ends_with(".D")) {
      EXPECT_TRUE(at::all(x == 1).item<bool>()) << name;
    } else if (name.ends_with("A_log")) {
      test::expect_close(x.exp(), at::arange(1, 65), 1e-6, 0, name);
    } else if (name.ends_with("dt_bias")) {
      expect_time_steps(x, name);
    } else if (name.find("conv1d") != std::string::npos) {
      expect_uniform(x, 0.5, name);
    } else if (name.ends_with("in_proj.weight") || name.starts_with("lm_head")) {
      expect_uniform(x, std::sqrt(1.0 / 128), name);
    } else if (name.ends_with("out_proj.weight")) {
      expect_uniform(x, std::sqrt(1.0 / 256 / 2), name);  // two layers
    } else {
      expect_normal(x, 0.02, name);
    }
  }
}

TEST(LanguageModel, SambaInitialisesAsPublished) {
  auto config = test::small_models().back().config;
  config.update(json{{"hidden_size", 128}, {"intermediate_size", 96}});
  LanguageModel model(ModelConfig::from_json(config));
  model.init(5);
  for (const auto& [name, x, decay, trainable] : model.parameters()) {
    EXPECT_EQ(decay, x.dim() > 1 && !name.ends_with("A_log")) << name;
    const bool residual =
        name.ends_with("o_proj.weight") || name.ends_with("out_proj.weight") || name.ends_with("down_proj.weight");
    if (name.ends_with("embeddings.weight")) {
      expect_normal(x, 0.02, name);
    } else if (name.ends_with("A_log")) {
      test::expect_close(x.exp(), at::arange(1, 5).expand_as(x), 1e-6, 0, name);
    } else if (name.ends_with("dt_proj.bias")) {
      expect_time_steps(x, name);
    } else if (name.ends_with("dt_proj.weight")) {
      expect_uniform(x, 1 / std::sqrt(8.0), name);  // of the rank, 128 / 16
    } else if (x.dim() == 2) {
      expect_uniform(x, (residual ? 0.5 : 1) / std::sqrt(static_cast<double>(x.size(1))), name);
    }
  }
}

// Mamba layers with narrow MLPs and attention layers with wide ones, both of 12 d^2 parameters and a little more.
TEST(LanguageModel, SambaAlternates) {
  const LanguageModel model(ModelConfig::from_json(samba(k760M)));
  for (const auto& parameter : model.parameters()) {
    const auto& name = parameter.name;
    if (name.ends_with("mlp.down_proj.weight")) {
      const bool attention = std::stoi(name.substr(std::string("backbone.layers.").size())) % 2 == 1;
      EXPECT_EQ(parameter.tensor.size(1), attention ? 4096 : 3072) << name;
    }
    EXPECT_EQ(name.find("layers.6.mixer.q_proj"), std::string::npos);
    EXPECT_EQ(name.find("layers.7.mixer.in_proj"), std::string::npos);
  }
  const int64_t d = 1536, inner = 2 * d,
                mamba = inner * (96 + 32) + 96 * inner + inner + inner * 16 + inner + 5 * inner;
  EXPECT_EQ(model.count_parameters().non_embedding, 24 * (12 * d * d + 2 * d) + 12 * mamba + d + 50257 * d);
}

TEST(LanguageModel, InitialisationDependsOnTheSeedAlone) {
  const auto config = ModelConfig::from_json(small_config("forgetting_transformer", kPro));
  const auto weights = [&](uint64_t seed) {
    LanguageModel model(config);
    model.init(seed);
    std::vector<at::Tensor> all;
    for (const auto& parameter : model.parameters()) all.push_back(parameter.tensor.flatten());
    return at::cat(all);
  };
  at::manual_seed(11);
  const auto undisturbed = at::rand({4});
  at::manual_seed(11);
  const auto first = weights(1);
  EXPECT_TRUE(at::equal(at::rand({4}), undisturbed));  // the caller's generator is left alone
  EXPECT_TRUE(at::equal(weights(1), first));
  EXPECT_FALSE(at::equal(weights(2), first));
}

// b_h = -ln(expm1(1/T_h)) makes σ(b_h) = exp(-1/T_h): head h remembers T_h tokens, log-spaced, for every gate type.
TEST(LanguageModel, DecayTimesAreLogSpacedForEveryGateType) {
  for (const std::string gate : {"full", "bias_only", "fixed"}) {
    auto config =
        small_config("forgetting_transformer",
                     {{"fgate_type", gate}, {"fgate_bias_init", true}, {"decay_time_min", 2}, {"decay_time_max", 128}});
    config["num_heads"] = 4;
    LanguageModel model(ModelConfig::from_json(config));
    model.init(1);
    int found = 0;
    for (const auto& parameter : model.parameters()) {
      if (parameter.name.find("fgate") == std::string::npos || parameter.tensor.dim() != 1) continue;
      ++found;
      EXPECT_FALSE(parameter.decay);
      EXPECT_EQ(parameter.trainable, gate != "fixed");
      const auto memory = at::log_sigmoid(parameter.tensor.to(at::kDouble)).reciprocal().neg();
      test::expect_close(memory, at::tensor({2.0, 8.0, 32.0, 128.0}, at::kDouble), 1e-4, 0, gate);
    }
    EXPECT_EQ(found, 2) << gate;  // one a layer
  }
}

// A fixed gate is ALiBi: attention with the bias slope_h * (i - j), slope_h = log f_h.
TEST(LanguageModel, AFixedGateIsALinearBias) {
  const int64_t T = 50, H = 4, D = 16;
  at::manual_seed(2);
  const auto draw = [&] { return at::randn({1, T, H, D}, at::kDouble); };
  const auto q = draw(), k = draw(), v = draw();
  const auto slope_H = at::tensor({-0.5, -0.1, -0.02, -0.001}, at::kDouble);
  const auto ours = ops::forgetting_attn(q, k, v, slope_H.expand({1, T, H})).o_BTHD;
  const auto i = at::arange(T, at::kDouble);
  const auto distance_TT = i.unsqueeze(1) - i.unsqueeze(0);
  const auto bias = (slope_H.view({H, 1, 1}) * distance_TT).masked_fill(distance_TT < 0, -INFINITY).unsqueeze(0);
  const auto alibi = at::scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), bias);
  test::expect_close(ours, alibi.transpose(1, 2), 1e-12, 0, "attention with a linear bias");
}

TEST(LanguageModel, FixedGatesAreNotLearnt) {
  auto model = test::random_model({"fixed", small_config("forgetting_transformer", {{"fgate_type", "fixed"},
                                                                                    {"fgate_bias_init", true},
                                                                                    {"decay_time_min", 2},
                                                                                    {"decay_time_max", 8}})},
                                  1);
  model.set_requires_grad(true);
  const auto ids = at::arange(12).view({1, 12});
  model.loss(ids, ids).total.backward();
  for (const auto& parameter : model.parameters()) {
    EXPECT_EQ(parameter.tensor.requires_grad(), !parameter.name.ends_with("fgate_bias")) << parameter.name;
    EXPECT_EQ(parameter.tensor.grad().defined(), !parameter.name.ends_with("fgate_bias")) << parameter.name;
  }
}

// bfloat16 activations with float32 masters: as close to float64 as rounding to 8 bits lets it, gradients in float32.
TEST(LanguageModel, Bfloat16ActivationsKeepFloat32Masters) {
  for (const auto& small : test::small_models()) {
    auto model = test::random_model(small, 4);
    const auto ids = at::arange(40).view({1, 40}), labels = (ids * 7 + 3) % 41;
    const auto exact = model.loss(ids, labels).total.item<double>();
    model.to(at::kCPU, at::kFloat);
    model.set_compute_dtype(at::kBFloat16);
    model.set_requires_grad(true);
    EXPECT_EQ(model.logits(ids).scalar_type(), at::kBFloat16);
    const auto loss = model.loss(ids, labels);
    EXPECT_EQ(loss.total.scalar_type(), at::kFloat);
    EXPECT_NEAR(loss.total.item<double>(), exact, 0.02 * exact) << small.name;
    loss.total.backward();
    for (const auto& parameter : model.parameters()) {
      // Lower bounds that are not applied have no gradient.
      if (!parameter.trainable || (parameter.name.ends_with("lower_bounds") && small.name == "hgrn2")) continue;
      EXPECT_EQ(parameter.tensor.grad().scalar_type(), at::kFloat) << small.name << " " << parameter.name;
      EXPECT_TRUE(parameter.tensor.grad().isfinite().all().item<bool>()) << small.name << " " << parameter.name;
    }
  }
}

TEST(LanguageModel, PruningKeepsItsPromiseAndSavesNothingWhenOff) {
  const auto ids = (at::arange(700) * 13 % 41).view({1, 700});
  // The bound of the logits comes from the scales of QK-norm, of each head, shared by all, or of fewer key heads.
  for (const auto& heads :
       {json::object(), json{{"qk_norm_share_param_across_head", true}}, json{{"num_kv_heads", 1}}}) {
    auto config = small_config("forgetting_transformer", kPro);
    config.update(json{{"fgate_bias_init", true}, {"decay_time_min", 2}, {"decay_time_max", 4}});
    config.update(heads);
    const auto dense = test::random_model({"dense", config}, 6).logits(ids);
    config["log_pruning_tolerance"] = -10;
    const auto pruned = test::random_model({"pruned", config}, 6).logits(ids);
    test::expect_close(pruned, dense, 1e-3, 0, "logits under pruning with ε = e^-10");
    EXPECT_FALSE(at::equal(pruned, dense)) << heads.dump();  // something was pruned
  }
}

TEST(LanguageModel, LossWeighsTokensAsAsked) {
  auto model = test::random_model(test::small_models()[1], 9);
  const auto ids = at::arange(20).view({2, 10});
  auto labels = (ids * 3 + 1) % 41;
  labels[0][4] = -100;
  const auto loss = model.loss(ids, labels);
  EXPECT_EQ(loss.loss_BT[0][4].item<double>(), 0);
  EXPECT_NEAR(loss.total.item<double>(), loss.loss_BT.sum().item<double>() / 19, 1e-12);
  const auto weight = at::linspace(0, 1, 20, at::kDouble).view({2, 10});
  const auto weighed = model.loss(ids, labels, {}, weight);
  EXPECT_NEAR(weighed.total.item<double>(), (weight * loss.loss_BT).sum().item<double>(), 1e-12);
  EXPECT_THROW(model.loss(ids, labels.narrow(1, 0, 9)), Error);
}

// Weights that have not been announced are NaN until they are: none may be read before. Of every kind of model, also
// where layers are computed again and where the embedding is the head.
TEST(LanguageModel, AnnouncesWeightsBeforeItReadsThem) {
  auto models = test::small_models();
  models.push_back({"tied", small_config("transformer", {{"tie_word_embeddings", true}})});
  for (const auto& small : models) {
    for (const auto recompute : {Recompute::kNone, Recompute::kFull}) {
      LanguageModel model(ModelConfig::from_json(small.config));
      model.init(3);
      model.set_requires_grad(true);
      model.set_recompute(recompute);
      const auto ids = at::arange(16, at::kLong).view({2, 8});
      const auto expected = model.loss(ids, ids).total.detach();

      std::vector<at::Tensor> kept;
      {
        const at::NoGradGuard no_grad;
        for (const auto& parameter : model.parameters()) {
          kept.push_back(parameter.tensor.detach().clone());
          at::Tensor(parameter.tensor).fill_(std::nan(""));
        }
      }
      size_t ready = 0;
      model.set_before_weights([&](size_t n) {
        const at::NoGradGuard no_grad;
        for (; ready < n; ++ready) at::Tensor(model.parameters()[ready].tensor).copy_(kept[ready]);
      });
      const auto loss = model.loss(ids, ids).total;
      EXPECT_EQ(ready, kept.size()) << small.name;
      EXPECT_TRUE(at::equal(loss, expected)) << small.name;
    }
  }
}

}  // namespace
}  // namespace fox::model
