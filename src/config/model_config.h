#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace fox {

/// The forget gate of a FoX layer (arXiv 2503.02130, section 3 and its ablations).
enum class GateType { kFull, kBiasOnly, kFixed, kNone };

/// A language model as its published config.json describes it: the same keys, the same defaults for a missing key.
/// Fields that a model_type does not have are left at their defaults and are neither read nor written for it.
struct ModelConfig {
  /// Published value, e.g. "forgetting_transformer-project_fox", "transformer-project_fox"; the part before '-' counts.
  std::string model_type = "forgetting_transformer-project_fox";

  int64_t vocab_size = 50257;
  int64_t hidden_size = 2048;
  int64_t num_hidden_layers = 24;
  double initializer_range = 0.02;
  bool tie_word_embeddings = false;
  std::optional<int64_t> bos_token_id;
  std::optional<int64_t> eos_token_id;

  // MLP: width intermediate_size, else 256 * ceil(floor(hidden_size * hidden_ratio * 2/3) / 256).
  double hidden_ratio = 4;
  std::optional<int64_t> intermediate_size;
  double norm_eps = 1e-6;

  // Attention (forgetting_transformer and transformer).
  int64_t num_heads = 32;
  std::optional<int64_t> num_kv_heads;
  std::optional<int64_t> window_size;
  bool use_rope = false;  // default true for model_type transformer
  double rope_base = 500000;
  std::optional<int64_t> max_position_embeddings;

  // FoX (Pro) parts, each on its own.
  GateType fgate_type = GateType::kFull;
  bool fgate_bias_init = false;  // start the biases at decay times log-spaced between the two below
  std::optional<double> decay_time_min;
  std::optional<double> decay_time_max;
  bool use_output_gate = false;
  std::string ogate_act = "sigmoid";  // or "silu"
  bool use_output_norm = false;
  bool qk_norm = false;
  bool qk_norm_share_param_across_head = false;
  bool use_k_shift = false;
  bool use_v_shift = false;
  std::optional<double> log_pruning_tolerance;

  /// model_type up to '-': forgetting_transformer, transformer, ….
  std::string kind() const;
  int64_t head_dim() const { return hidden_size / num_heads; }
  int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
  int64_t mlp_width() const;

  /// Whether models of this model_type can be built.
  static bool is_built(const std::string& model_type);
  /// Reads the published keys. Throws fox::Error naming `where` and the key: unknown keys (nearest known one offered;
  /// keys that transformers itself writes, such as architectures or torch_dtype, are accepted), types, ranges, head
  /// sizes that do not divide, model types that are not known. `locate` may tell where a key stands better than `where`.
  static ModelConfig from_json(const nlohmann::json& json, const std::string& where = "config.json",
                               const std::function<std::string(const std::string& key)>& locate = nullptr);
  /// Every key of the model_type, in published spelling.
  nlohmann::json to_json() const;
};

}  // namespace fox
