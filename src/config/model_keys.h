#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "config/key_reader.h"
#include "config/model_config.h"

// The published config.json keys of every model type, each listed once: reading and writing follow the same list.
namespace fox {

// Far beyond any model, but small enough that products of three sizes stay within int64.
inline const Range kCount = Range::between(1, 1 << 20);
inline const Range kVocab = Range::between(1, 1 << 30);
inline const Range kRatio = Range::between(1e-3, 1e3);

inline const std::vector<std::string> kGateNames{"full", "bias_only", "fixed", "none"};
inline const std::vector<std::string> kModes{"chunk", "fused_chunk", "fused_recurrent"};  // the same function

// A key in both directions.
struct Reading {
  KeyReader& reader;

  template <typename T>
  void operator()(const std::string& key, T& value, Range range) {
    reader.read(key, value, range);
  }
  void operator()(const std::string& key, bool& value) { reader.read(key, value); }
  void choice(const std::string& key, std::string& value, const std::vector<std::string>& choices) {
    reader.read_choice(key, value, choices);
  }
  void gate(const std::string& key, GateType& value) {
    std::string name = kGateNames[static_cast<size_t>(value)];
    reader.read_choice(key, name, kGateNames);
    value = static_cast<GateType>(std::find(kGateNames.begin(), kGateNames.end(), name) - kGateNames.begin());
  }
  /// A published key of which one value is built.
  void only(const std::string& key, bool built) {
    bool value = built;
    reader.read(key, value);
    if (value != built) reader.fail(key, fmt::format("must be {}", built), "no other value is supported");
  }
  /// The same for numbers, a missing key meaning `missing`.
  void only(const std::string& key, int64_t built, int64_t missing) {
    int64_t value = missing;
    reader.read(key, value);
    if (value != built) {
      reader.fail(key, fmt::format("must be {}, not {}{}", built, value, reader.has(key) ? "" : " (its default)"),
                  "no other value is supported");
    }
  }
  void only_null(const std::string& key) {
    if (reader.has(key)) reader.fail(key, "must be null", "other values are not supported");
    reader.accept({key});
  }
  /// An object under a key, or null.
  template <typename Keys>
  void table(const std::string& key, bool& present, const Keys& keys) {
    present = reader.has(key);
    reader.accept({key});
    if (!present) return;
    KeyReader inner = reader.table(key);
    Reading reading{inner};
    keys(reading);
    inner.finish();
  }
  /// A published key that chooses between equivalent computations.
  void ignored(const std::string& key, bool) {
    bool value = false;
    reader.read(key, value);
  }
};

struct Writing {
  nlohmann::json& json;

  template <typename T>
  void operator()(const std::string& key, const std::optional<T>& value, Range) {
    json[key] = value ? nlohmann::json(*value) : nlohmann::json(nullptr);
  }
  template <typename T>
  void operator()(const std::string& key, const T& value, Range) {
    json[key] = value;
  }
  void operator()(const std::string& key, bool value) { json[key] = value; }
  void choice(const std::string& key, const std::string& value, const std::vector<std::string>&) { json[key] = value; }
  void gate(const std::string& key, GateType value) { json[key] = kGateNames[static_cast<size_t>(value)]; }
  void only(const std::string& key, bool built) { json[key] = built; }
  void only(const std::string& key, int64_t built, int64_t) { json[key] = built; }
  void only_null(const std::string& key) { json[key] = nullptr; }
  template <typename Keys>
  void table(const std::string& key, bool present, const Keys& keys) {
    json[key] = nullptr;
    if (!present) return;
    nlohmann::json inner = nlohmann::json::object();
    Writing writing{inner};
    keys(writing);
    json[key] = inner;
  }
  void ignored(const std::string& key, bool usual) { json[key] = usual; }
};

template <typename Visitor>
void visit_common(ModelConfig& c, Visitor& key) {
  key("vocab_size", c.vocab_size, kVocab);
  key("hidden_size", c.hidden_size, kCount);
  key("num_hidden_layers", c.num_hidden_layers, kCount);
  key("initializer_range", c.initializer_range, Range::at_least(0));
  key("tie_word_embeddings", c.tie_word_embeddings);
  key("bos_token_id", c.bos_token_id, Range::at_least(0));
  key("eos_token_id", c.eos_token_id, Range::at_least(0));
  key.ignored("fuse_cross_entropy", true);
}

template <typename Visitor>
void visit_mlp(ModelConfig& c, Visitor& key) {
  std::string act = "swish";
  key("hidden_ratio", c.hidden_ratio, kRatio);
  key("intermediate_size", c.intermediate_size, kCount);
  key.choice("hidden_act", act, {"swish", "silu"});  // two names of one function
  key("norm_eps", c.norm_eps, Range::at_least(0));
}

template <typename Visitor>
void visit_kv_heads_and_window(ModelConfig& c, Visitor& key) {
  key("num_heads", c.num_heads, kCount);
  key("num_kv_heads", c.num_kv_heads, kCount);
  key("window_size", c.window_size, Range::at_least(1));
}

template <typename Visitor>
void visit_attention(ModelConfig& c, Visitor& key) {
  visit_kv_heads_and_window(c, key);
  key("max_position_embeddings", c.max_position_embeddings, Range::at_least(1));
  key("use_rope", c.use_rope);
  key("rope_base", c.rope_base, Range::above(0));
  key.only("attention_bias", false);
  key.only("elementwise_affine", true);
  key.ignored("fuse_norm", true);
}

template <typename Visitor>
void visit_fox(ModelConfig& c, Visitor& key) {
  key.gate("fgate_type", c.fgate_type);
  key("fgate_bias_init", c.fgate_bias_init);
  key("decay_time_min", c.decay_time_min, Range::above(0));
  key("decay_time_max", c.decay_time_max, Range::above(0));
  key("use_output_gate", c.use_output_gate);
  key.choice("ogate_act", c.ogate_act, {"sigmoid", "silu"});
  key("use_output_norm", c.use_output_norm);
  key("qk_norm", c.qk_norm);
  key("qk_norm_share_param_across_head", c.qk_norm_share_param_across_head);
  key("use_k_shift", c.use_k_shift);
  key("use_v_shift", c.use_v_shift);
  key("log_pruning_tolerance", c.log_pruning_tolerance, Range{.max = 0});
}

template <typename Visitor>
void visit_hgrn2(ModelConfig& c, Visitor& key) {
  std::string mode = "chunk";
  key.choice("attn_mode", mode, kModes);
  key.only_null("num_heads");
  key("expand_ratio", c.expand_ratio, kCount);
  key.only("use_short_conv", false);
  key("conv_size", c.conv_size, kCount);
  key("use_lower_bound", c.use_lower_bound);
  key("apply_lower_bound", c.apply_lower_bound);
  key("max_position_embeddings", c.max_position_embeddings, Range::at_least(1));
  key.only("elementwise_affine", true);
}

template <typename Visitor>
void visit_delta_net(ModelConfig& c, Visitor& key) {
  std::string mode = "chunk", qk_norm = "l2", qk_activation = "silu";
  key.choice("attn_mode", mode, kModes);
  key("num_heads", c.num_heads, kCount);
  key.only("expand_k", 1, 1);
  key.only("expand_v", 1, 1);
  key.only("use_gate", false);
  key.only("use_short_conv", true);
  key("conv_size", c.conv_size, kCount);
  key.only("use_beta", true);
  key.only("use_output_norm", true);
  key.choice("qk_norm", qk_norm, {"l2"});
  key.choice("qk_activation", qk_activation, {"silu"});
  key.only("norm_first", false);
  key("max_position_embeddings", c.max_position_embeddings, Range::at_least(1));
}

// What Mamba-2 and Samba have in common.
template <typename Visitor>
void visit_state_space(ModelConfig& c, Visitor& key) {
  std::string act = "silu";
  key("state_size", c.state_size, kCount);
  key("expand", c.expand, kCount);
  key("conv_kernel", c.conv_kernel, kCount);
  key.only("use_bias", false);
  key("use_conv_bias", c.use_conv_bias);
  key.choice("hidden_act", act, {"swish", "silu"});
  key("time_step_rank", c.time_step_rank, kCount);
  key("time_step_min", c.time_step_min, Range::above(0));
  key("time_step_max", c.time_step_max, Range::above(0));
  key("time_step_floor", c.time_step_floor, Range::at_least(0));
  key("rescale_prenorm_residual", c.rescale_prenorm_residual);
}

template <typename Visitor>
void visit_mamba2(ModelConfig& c, Visitor& key) {
  key("num_heads", c.num_heads, kCount);
  key("head_dim", c.ssm_head_dim, kCount);
  key("layer_norm_epsilon", c.norm_eps, Range::at_least(0));
  key.only("n_groups", 1, 8);
  key.ignored("residual_in_fp32", true);
  key("time_step_limit", c.time_step_limit, Range::at_least(0));
  key.only("rms_norm", true);
  key("chunk_size", c.chunk_size, kCount);
}

template <typename Visitor>
void visit_samba(ModelConfig& c, Visitor& key) {
  key("norm_eps", c.norm_eps, Range::at_least(0));
  key("attn_hidden_ratio", c.attn_hidden_ratio, kRatio);
  key("mamba_hidden_ratio", c.mamba_hidden_ratio, kRatio);
  key("intermediate_size", c.intermediate_size, kCount);
  key("time_step_scale", c.time_step_scale, Range::above(0));
  key.choice("time_step_init_scheme", c.time_step_init_scheme, {"random", "constant"});
  key("rope_base", c.rope_base, Range::above(0));
  key("max_position_embeddings", c.max_position_embeddings, Range::at_least(1));
  key.ignored("residual_in_fp32", false);
  key.ignored("fuse_norm", true);
  key.table("attn", c.hybrid_attention, [&](auto& inner) {
    inner.only_null("layers");
    visit_kv_heads_and_window(c, inner);
  });
}

/// Every key of c.model_type, in the order of its groups.
template <typename Visitor>
void visit(ModelConfig& c, Visitor& key) {
  const std::string kind = c.kind();
  visit_common(c, key);
  if (kind == "mamba2" || kind == "samba") {
    visit_state_space(c, key);
    kind == "mamba2" ? visit_mamba2(c, key) : visit_samba(c, key);
    return;
  }
  visit_mlp(c, key);
  if (kind == "hgrn2") return visit_hgrn2(c, key);
  if (kind == "delta_net") return visit_delta_net(c, key);
  visit_attention(c, key);
  if (kind == "forgetting_transformer") visit_fox(c, key);
}

}  // namespace fox
