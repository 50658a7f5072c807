#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "model/language_model.h"

// One small model of each kind, for tests that hold for all of them.
namespace fox::test {

struct SmallModel {
  std::string name;
  nlohmann::json config;
};

inline std::ostream& operator<<(std::ostream& out, const SmallModel& model) { return out << model.name; }

/// Two layers of width 32; `more` adds to or replaces keys.
inline nlohmann::json small_config(const std::string& kind, const nlohmann::json& more = nlohmann::json::object()) {
  nlohmann::json config{{"model_type", kind + "-project_fox"},
                        {"vocab_size", 41},
                        {"hidden_size", 32},
                        {"num_hidden_layers", 2},
                        {"intermediate_size", 24}};
  if (kind == "forgetting_transformer" || kind == "transformer") config["num_heads"] = 2;
  config.update(more);
  return config;
}

inline nlohmann::json small_mamba2_config(const nlohmann::json& more = nlohmann::json::object()) {
  auto config = small_config("mamba2", {{"num_heads", 4},
                                        {"head_dim", 16},
                                        {"state_size", 8},
                                        {"n_groups", 1},
                                        {"chunk_size", 16},
                                        {"initializer_range", 0.02}});
  config.update(more);
  return config;
}

inline std::vector<SmallModel> small_models() {
  const nlohmann::json pro{{"use_k_shift", true},
                           {"use_v_shift", true},
                           {"qk_norm", true},
                           {"use_output_gate", true},
                           {"use_output_norm", true}};
  const auto fox = [&](nlohmann::json more, bool with_pro) {
    if (with_pro) more.update(pro);
    return small_config("forgetting_transformer", more);
  };
  return {
      {"fox_llama", fox(nlohmann::json::object(), false)},
      {"fox_pro", fox(nlohmann::json::object(), true)},
      {"fox_pro_rope_window", fox({{"use_rope", true}, {"window_size", 5}}, true)},
      {"fox_pro_grouped", fox({{"num_kv_heads", 1}, {"qk_norm_share_param_across_head", true}}, true)},
      {"fox_pro_fixed",
       fox({{"fgate_type", "fixed"}, {"fgate_bias_init", true}, {"decay_time_min", 2}, {"decay_time_max", 64}}, true)},
      {"fox_bias_only", fox({{"fgate_type", "bias_only"}}, false)},
      {"transformer_pro", fox({{"fgate_type", "none"}, {"use_rope", true}}, true)},
      {"transformer", small_config("transformer")},
      {"transformer_grouped", small_config("transformer", {{"num_heads", 4}, {"num_kv_heads", 2}})},
      {"transformer_window", small_config("transformer", {{"window_size", 4}})},
      {"hgrn2", small_config("hgrn2", {{"expand_ratio", 8}})},
      {"hgrn2_lower_bound", small_config("hgrn2", {{"expand_ratio", 16}, {"apply_lower_bound", true}})},
      {"delta_net", small_config("delta_net", {{"num_heads", 2}})},
      {"mamba2", small_mamba2_config()},
      {"samba",
       small_config("samba",
                    {{"state_size", 4},
                     {"attn", {{"layers", nullptr}, {"num_heads", 4}, {"num_kv_heads", 2}, {"window_size", 5}}}})}};
}

/// A float64 model whose weights are all far from their symmetric starting values.
inline model::LanguageModel random_model(const SmallModel& small, uint64_t seed) {
  model::LanguageModel model(ModelConfig::from_json(small.config));
  model.init(seed);
  model.to(at::kCPU, at::kDouble);
  auto generator = at::detail::createCPUGenerator(seed);
  for (const auto& parameter : model.parameters()) {
    if (!parameter.trainable) continue;
    const double scale =
        parameter.tensor.dim() >= 2 ? 1.0 / std::sqrt(static_cast<double>(parameter.tensor.size(-1))) : 0.3;
    parameter.tensor.add_(at::randn(parameter.tensor.sizes(), generator, parameter.tensor.options()), scale);
  }
  return model;
}

}  // namespace fox::test
