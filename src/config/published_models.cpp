#include "config/published_models.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/nearest.h"

namespace fox {
namespace {

using nlohmann::json;

/// What differs from size to size; heads of 64 channels for FoX, else as chosen by the paper.
struct Size {
  int64_t width, layers, fox_heads, transformer_heads, delta_net_heads, mamba2_layers;
  int64_t expand_ratio = 128, ssm_head_dim = 64, state_size = 128;
};

const std::map<std::string, Size>& sizes() {
  static const std::map<std::string, Size> all{
      {"tiny", {64, 2, 2, 2, 2, 2, 32, 32, 16}},
      {"125m", {768, 12, 12, 12, 6, 24}},
      {"360m", {1024, 24, 16, 16, 8, 48}},
      {"760m", {1536, 24, 24, 12, 12, 48}},
  };
  return all;
}

const json kPro{{"hidden_ratio", 3.5},
                {"use_output_gate", true},
                {"use_output_norm", true},
                {"qk_norm", true},
                {"use_k_shift", true},
                {"use_v_shift", true},
                {"qk_norm_share_param_across_head", true}};

json fox(const Size& s, bool pro) {
  json keys = pro ? kPro : json::object();
  keys["model_type"] = "forgetting_transformer-project_fox";
  keys["num_heads"] = s.fox_heads;
  return keys;
}

json transformer_pro(const Size& s) {
  json keys = fox(s, true);
  keys["num_heads"] = s.transformer_heads;
  keys["fgate_type"] = "none";
  keys["use_rope"] = true;
  return keys;
}

json transformer(const Size& s, bool window) {
  json keys{{"model_type", "transformer-project_fox"}, {"num_heads", s.transformer_heads}};
  if (window) keys["window_size"] = 2048;
  return keys;
}

json samba(const Size& s) {
  return {{"model_type", "samba-project_fox"},
          {"attn", {{"num_heads", s.transformer_heads}, {"window_size", 2048}}},
          {"state_size", 16},
          {"intermediate_size", 2 * s.width}};
}

json mamba2(const Size& s) {
  return {{"model_type", "mamba2-project_fox"},
          {"num_heads", 2 * s.width / s.ssm_head_dim},
          {"head_dim", s.ssm_head_dim},
          {"state_size", s.state_size},
          {"n_groups", 1},
          {"num_hidden_layers", s.mamba2_layers}};
}

json keys_of(const std::string& model, const Size& s) {
  if (model == "fox_pro") return fox(s, true);
  if (model == "fox_llama") return fox(s, false);
  if (model == "transformer_pro") return transformer_pro(s);
  if (model == "transformer_llama") return transformer(s, false);
  if (model == "transformer_swa") return transformer(s, true);
  if (model == "samba") return samba(s);
  if (model == "mamba2") return mamba2(s);
  if (model == "hgrn2") return {{"model_type", "hgrn2-project_fox"}, {"expand_ratio", s.expand_ratio}};
  return {{"model_type", "delta_net-project_fox"}, {"num_heads", s.delta_net_heads}};
}

void check_known(const char* what, const std::string& name, const std::vector<std::string>& known) {
  if (std::find(known.begin(), known.end(), name) != known.end()) return;
  throw UsageError(fmt::format("unknown {} '{}'", what, name), suggest(name, known));
}

}  // namespace

const std::vector<std::string>& published_models() {
  static const std::vector<std::string> names{"fox_pro",         "fox_llama", "transformer_pro", "transformer_llama",
                                              "transformer_swa", "samba",     "mamba2",          "hgrn2",
                                              "delta_net"};
  return names;
}

const std::vector<std::string>& published_sizes() {
  static const std::vector<std::string> names{"125m", "360m", "760m", "tiny"};
  return names;
}

ModelConfig published_model(const std::string& model, const std::string& size) {
  check_known("model", model, published_models());
  check_known("size", size, published_sizes());
  const Size& s = sizes().at(size);
  json keys = keys_of(model, s);
  keys["hidden_size"] = s.width;
  keys["vocab_size"] = 50257;
  keys["initializer_range"] = 0.02;
  if (!keys.contains("num_hidden_layers")) keys["num_hidden_layers"] = s.layers;
  return ModelConfig::from_json(keys, fmt::format("{} {}", model, size));
}

}  // namespace fox
