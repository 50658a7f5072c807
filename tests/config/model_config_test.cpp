#include "config/model_config.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/error.h"

namespace fox {
namespace {

using nlohmann::json;

// What the user is told about a config.json, "message | hint"; "" when it is accepted.
std::string complaint(const json& config) {
  try {
    ModelConfig::from_json(config);
  } catch (const Error& error) {
    return std::string(error.what()) + " | " + error.hint();
  }
  return "";
}

// The published FoX (Pro) 760M configuration, as transformers 4.44.0 writes it.
json published_pro() {
  return json::parse(R"({
    "architectures": ["ForgettingTransformerForCausalLM"], "attention_bias": false, "bos_token_id": null,
    "decay_time_max": null, "decay_time_min": null, "elementwise_affine": true, "eos_token_id": null,
    "fgate_bias_init": false, "fgate_type": "full", "fuse_cross_entropy": true, "fuse_norm": true,
    "hidden_act": "swish", "hidden_ratio": 3.5, "hidden_size": 1536, "initializer_range": 0.02,
    "intermediate_size": null, "log_pruning_tolerance": null, "max_position_embeddings": null,
    "model_type": "forgetting_transformer-project_fox", "norm_eps": 1e-06, "num_heads": 24,
    "num_hidden_layers": 24, "num_kv_heads": null, "ogate_act": "sigmoid", "qk_norm": true,
    "qk_norm_share_param_across_head": true, "rope_base": 500000.0, "tie_word_embeddings": false,
    "torch_dtype": "float32", "transformers_version": "4.44.0", "use_cache": true, "use_k_shift": true,
    "use_output_gate": true, "use_output_norm": true, "use_rope": false, "use_v_shift": true, "vocab_size": 50257,
    "window_size": null})");
}

TEST(ModelConfig, ReadsThePublishedConfiguration) {
  const auto config = ModelConfig::from_json(published_pro());
  EXPECT_EQ(config.kind(), "forgetting_transformer");
  EXPECT_EQ(config.hidden_size, 1536);
  EXPECT_EQ(config.head_dim(), 64);
  EXPECT_EQ(config.kv_heads(), 24);
  EXPECT_EQ(config.mlp_width(), 3584);
  EXPECT_TRUE(config.qk_norm_share_param_across_head);
  EXPECT_EQ(config.fgate_type, GateType::kFull);
  EXPECT_FALSE(config.log_pruning_tolerance);
}

TEST(ModelConfig, WritesEveryPublishedKey) {
  auto published = published_pro();
  const auto written = ModelConfig::from_json(published).to_json();
  published.erase("torch_dtype");
  published.erase("transformers_version");
  EXPECT_EQ(written, published);
}

TEST(ModelConfig, MissingKeysMeanTheClassDefaults) {
  const auto fox = ModelConfig::from_json(json::parse(R"({"model_type": "forgetting_transformer-project_fox"})"));
  EXPECT_EQ(fox.hidden_size, 2048);
  EXPECT_EQ(fox.hidden_ratio, 4);
  EXPECT_FALSE(fox.use_rope);
  EXPECT_FALSE(fox.qk_norm_share_param_across_head);
  const auto transformer = ModelConfig::from_json(json::parse(R"({"model_type": "transformer-project_fox"})"));
  EXPECT_TRUE(transformer.use_rope);
}

TEST(ModelConfig, RoundTripsEveryGateType) {
  for (const std::string gate : {"full", "bias_only", "fixed", "none"}) {
    json config{{"fgate_type", gate}, {"fgate_bias_init", true}, {"decay_time_min", 2}, {"decay_time_max", 64.5}};
    const auto written = ModelConfig::from_json(config).to_json();
    EXPECT_EQ(written["fgate_type"], gate);
    EXPECT_EQ(written["decay_time_max"], 64.5);
    EXPECT_EQ(ModelConfig::from_json(written).to_json(), written);
  }
}

// The published sizes (arXiv 2503.02130, Table 4).
TEST(ModelConfig, MlpWidthIsRoundedUpTo256) {
  const auto width = [](int64_t hidden, double ratio) {
    return ModelConfig::from_json(json{{"hidden_size", hidden}, {"hidden_ratio", ratio}}).mlp_width();
  };
  EXPECT_EQ(width(768, 4), 2048);
  EXPECT_EQ(width(768, 3.5), 1792);
  EXPECT_EQ(width(1024, 4), 2816);
  EXPECT_EQ(width(1024, 3.5), 2560);
  EXPECT_EQ(width(1536, 4), 4096);
  EXPECT_EQ(width(1536, 3.5), 3584);
}

TEST(ModelConfig, NamesWhatIsWrong) {
  EXPECT_EQ(complaint({{"hiden_size", 4}}),
            "config.json: 'hiden_size' is not a known key | did you mean 'hidden_size'?");
  EXPECT_EQ(complaint({{"model_type", "transformr-project_fox"}}),
            "config.json: 'model_type' \"transformr-project_fox\" is not a model type that is built | "
            "did you mean 'transformer-project_fox'?");
  EXPECT_EQ(complaint({{"fgate_type", "fulll"}}),
            "config.json: 'fgate_type' cannot be \"fulll\" | did you mean 'full'?");
  EXPECT_EQ(complaint({{"hidden_size", "big"}}),
            "config.json: 'hidden_size' must be a whole number, not \"big\" | written like 4, without quotes");
  EXPECT_EQ(complaint({{"num_heads", 0}}),
            "config.json: 'num_heads' must be at least 1 and at most 1048576, not 0 | left out, it is 32");
  EXPECT_EQ(complaint({{"hidden_size", 100}, {"num_heads", 3}}),
            "config.json: 'num_heads' = 3 does not divide hidden_size = 100 | the heads share the width equally");
  EXPECT_EQ(complaint({{"num_heads", 4}, {"num_kv_heads", 3}, {"hidden_size", 64}}),
            "config.json: 'num_kv_heads' = 3 does not divide num_heads = 4 | "
            "each key-value head serves the same number of query heads");
  EXPECT_EQ(complaint({{"num_heads", 3}, {"hidden_size", 99}, {"use_rope", true}}),
            "config.json: 'use_rope' needs an even head size, not 33 | the head size is hidden_size / num_heads");
  EXPECT_EQ(complaint({{"fgate_bias_init", true}}),
            "config.json: 'fgate_bias_init' needs decay_time_min and decay_time_max | "
            "the memory lengths, in tokens, of the first and the last head");
  EXPECT_EQ(complaint({{"attention_bias", true}}),
            "config.json: 'attention_bias' must be false | no other value is supported");
  EXPECT_EQ(complaint({{"hidden_act", "hardtanh"}}),
            "config.json: 'hidden_act' cannot be \"hardtanh\" | known: swish, silu");
  EXPECT_EQ(complaint({{"log_pruning_tolerance", 1}}).substr(0, 42), "config.json: 'log_pruning_tolerance' must ");
  EXPECT_EQ(complaint(json::array()),
            "config.json must be an object of keys and values, not [] | docs/formats.md shows one");
}

// The published HGRN2 760M configuration, and what does not fit.
TEST(ModelConfig, Hgrn2) {
  auto published = json::parse(R"({
    "architectures": ["HGRN2ForCausalLM"], "attn_mode": "chunk", "bos_token_id": null, "conv_size": 4,
    "elementwise_affine": true, "eos_token_id": null, "expand_ratio": 128, "fuse_cross_entropy": true,
    "hidden_act": "swish", "hidden_ratio": 4, "hidden_size": 1536, "initializer_range": 0.02,
    "intermediate_size": null, "max_position_embeddings": 2048, "model_type": "hgrn2-project_fox", "norm_eps": 1e-06,
    "num_heads": null, "num_hidden_layers": 24, "tie_word_embeddings": false, "torch_dtype": "float32",
    "transformers_version": "4.44.0", "use_cache": true, "use_lower_bound": true, "use_short_conv": false,
    "vocab_size": 50257})");
  const auto written = ModelConfig::from_json(published).to_json();
  published.erase("torch_dtype");
  published.erase("transformers_version");
  published["apply_lower_bound"] = false;  // ours: the published code has the parameter and ignores it
  EXPECT_EQ(written, published);

  const json hgrn2{{"model_type", "hgrn2-project_fox"}, {"hidden_size", 96}};
  const auto with = [&](const std::string& key, const json& value) {
    json config = hgrn2;
    config[key] = value;
    return complaint(config);
  };
  EXPECT_EQ(with("expand_ratio", 36),
            "config.json: 'expand_ratio' = 36 does not divide hidden_size = 96 | "
            "it is the number of channels of a head; the heads share the width equally");
  EXPECT_EQ(with("num_heads", 4), "config.json: 'num_heads' must be null | other values are not supported");
  EXPECT_EQ(with("use_short_conv", true), "config.json: 'use_short_conv' must be false | no other value is supported");
}

// The published 760M configurations of the other systems: read and written again without a change.
TEST(ModelConfig, ReadsAndWritesTheComparisonSystems) {
  const auto check = [](json published) {
    published.update(json{{"vocab_size", 50257},
                          {"hidden_size", 1536},
                          {"tie_word_embeddings", false},
                          {"bos_token_id", nullptr},
                          {"eos_token_id", nullptr},
                          {"initializer_range", 0.02},
                          {"fuse_cross_entropy", true},
                          {"use_cache", true}});
    EXPECT_EQ(ModelConfig::from_json(published).to_json(), published);
  };
  check(json::parse(R"({
    "architectures": ["DeltaNetForCausalLM"], "model_type": "delta_net-project_fox", "num_hidden_layers": 24,
    "num_heads": 12, "expand_k": 1, "expand_v": 1, "use_gate": false, "use_short_conv": true, "conv_size": 4,
    "use_beta": true, "use_output_norm": true, "attn_mode": "chunk", "qk_norm": "l2", "qk_activation": "silu",
    "norm_first": false, "norm_eps": 1e-06, "hidden_ratio": 4, "intermediate_size": null, "hidden_act": "swish",
    "max_position_embeddings": 2048})"));
  auto mamba2 = json::parse(R"({
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2-project_fox", "num_hidden_layers": 48,
    "num_heads": 48, "head_dim": 64, "state_size": 128, "layer_norm_epsilon": 1e-05, "expand": 2, "conv_kernel": 4,
    "n_groups": 1, "use_bias": false, "use_conv_bias": true, "hidden_act": "silu", "residual_in_fp32": true,
    "time_step_rank": 96, "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001,
    "time_step_limit": [0.0, 1.7976931348623157e308], "rescale_prenorm_residual": true, "rms_norm": true,
    "chunk_size": 256})");
  check(mamba2);
  mamba2["hidden_size"] = 1536;
  mamba2["time_step_limit"][1] = std::numeric_limits<double>::infinity();
  EXPECT_EQ(ModelConfig::from_json(mamba2).time_step_limit[1], std::numeric_limits<double>::max());
  check(json::parse(R"({
    "architectures": ["SambaForCausalLM"], "model_type": "samba-project_fox", "num_hidden_layers": 24,
    "attn": {"layers": null, "num_heads": 12, "num_kv_heads": null, "window_size": 2048}, "attn_hidden_ratio": 4,
    "mamba_hidden_ratio": 3, "state_size": 16, "intermediate_size": 3072, "expand": 2, "conv_kernel": 4,
    "time_step_rank": 96, "time_step_scale": 1.0, "time_step_min": 0.001, "time_step_max": 0.1,
    "time_step_floor": 0.0001, "time_step_init_scheme": "random", "norm_eps": 1e-05, "residual_in_fp32": false,
    "use_bias": false, "use_conv_bias": true, "rescale_prenorm_residual": true, "rope_base": 500000.0,
    "fuse_norm": true, "hidden_act": "silu", "max_position_embeddings": 2048})"));
}

TEST(ModelConfig, NamesWhatDoesNotFitInTheComparisonSystems) {
  const json mamba2{
      {"model_type", "mamba2-project_fox"}, {"hidden_size", 64}, {"num_heads", 8}, {"head_dim", 16}, {"n_groups", 1}};
  const auto with = [](json config, const std::string& key, const json& value) {
    config[key] = value;
    return complaint(config);
  };
  EXPECT_EQ(with(mamba2, "n_groups", 1), "");
  EXPECT_EQ(with(mamba2, "num_heads", 7),
            "config.json: 'num_heads' * head_dim = 7 * 16 is not expand * hidden_size = 128 | "
            "the heads share the inner width equally");
  EXPECT_EQ(with(mamba2, "chunk_size", 0),
            "config.json: 'chunk_size' must be at least 1 and at most 1048576, not 0 | left out, it is 256");
  EXPECT_EQ(with(mamba2, "state_size", 0),
            "config.json: 'state_size' must be at least 1 and at most 1048576, not 0 | left out, it is 64");
  EXPECT_EQ(with(mamba2, "n_groups", 8), "config.json: 'n_groups' must be 1, not 8 | no other value is supported");
  EXPECT_EQ(complaint({{"model_type", "mamba2-project_fox"}}),
            "config.json: 'n_groups' must be 1, not 8 (its default) | no other value is supported");
  EXPECT_EQ(with(mamba2, "time_step_limit", {1, 0.5}),
            "config.json: 'time_step_limit' must be two numbers, the smaller first | the default is [0, Infinity]");
  const json delta{{"model_type", "delta_net-project_fox"}, {"hidden_size", 64}, {"num_heads", 4}};
  EXPECT_EQ(with(delta, "num_heads", 5),
            "config.json: 'num_heads' = 5 does not divide hidden_size = 64 | the heads share the width equally");
  EXPECT_EQ(with(delta, "qk_norm", "sum"), "config.json: 'qk_norm' cannot be \"sum\" | known: l2");
  const json samba{{"model_type", "samba-project_fox"}, {"hidden_size", 64}, {"attn", {{"num_heads", 4}}}};
  EXPECT_EQ(with(samba, "attn", {{"layers", {1, 3}}, {"num_heads", 4}}),
            "config.json: 'attn.layers' must be null | other values are not supported");
  EXPECT_EQ(with(samba, "attn", {{"num_head", 4}}),
            "config.json: 'attn.num_head' is not a known key | did you mean 'num_heads'?");
  EXPECT_EQ(with(samba, "time_step_min", 0.5),
            "config.json: 'time_step_min' = 0.5 is above time_step_max = 0.1 | time steps are drawn between the two");
}

// Keys of one model type are unknown to another: a gate in a plain transformer is a mistake, not a wish.
TEST(ModelConfig, RefusesKeysOfAnotherModelType) {
  EXPECT_EQ(complaint({{"model_type", "transformer-project_fox"}, {"qk_norm", true}}).substr(0, 44),
            "config.json: 'qk_norm' is not a known key | ");
}

}  // namespace
}  // namespace fox
