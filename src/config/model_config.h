#pragma once

#include <cstdint>
#include <functional>
#include <limits>
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
  /// Published value: forgetting_transformer, transformer, hgrn2, delta_net, mamba2 or samba, each with "-project_fox";
  /// the part before '-' counts.
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
  double norm_eps = 1e-6;  // mamba2: layer_norm_epsilon

  // Attention (forgetting_transformer, transformer, and Samba's layers of it); num_heads also of DeltaNet and Mamba-2.
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

  // HGRN2: heads of expand_ratio channels.
  int64_t expand_ratio = 128;
  bool use_lower_bound = true;     // lower bounds of the gates are parameters
  bool apply_lower_bound = false;  // and are applied, which the published runs never did

  // DeltaNet.
  int64_t conv_size = 4;

  // Mamba-2 (mamba2) and Mamba (samba); head_dim, chunk_size and time_step_limit are keys of Mamba-2 alone.
  int64_t ssm_head_dim = 64;  // mamba2: head_dim
  int64_t state_size = 64;
  int64_t expand = 2;  // inner width / hidden_size
  int64_t conv_kernel = 4;
  bool use_conv_bias = true;
  int64_t chunk_size = 256;               // tokens that are computed together; changes nothing but the time it takes
  std::optional<int64_t> time_step_rank;  // default ceil(hidden_size / 16)
  double time_step_min = 1e-3, time_step_max = 0.1, time_step_floor = 1e-4;  // of the initial time steps
  double time_step_scale = 1;
  std::string time_step_init_scheme = "random";  // or "constant"
  std::vector<double> time_step_limit{0, std::numeric_limits<double>::max()};
  bool rescale_prenorm_residual = true;

  // Samba: every second layer is attention.
  bool hybrid_attention = false;  // attn is not null
  double attn_hidden_ratio = 4, mamba_hidden_ratio = 3;

  /// model_type up to '-': forgetting_transformer, transformer, hgrn2, ….
  std::string kind() const;
  int64_t head_dim() const { return hidden_size / num_heads; }
  int64_t kv_heads() const { return num_kv_heads.value_or(num_heads); }
  int64_t inner_width() const { return expand * hidden_size; }
  int64_t time_rank() const { return time_step_rank.value_or((hidden_size + 15) / 16); }
  /// Whether layer `layer` of a Samba model is attention.
  bool is_samba_attention(int64_t layer) const { return hybrid_attention && layer % 2 == 1; }
  /// Width of the MLP of layer `layer`; 0 where there is none.
  int64_t mlp_width(int64_t layer = 0) const;

  /// Whether models of this model_type can be built.
  static bool is_built(const std::string& model_type);
  /// Reads the published keys. Throws fox::Error naming `where` and the key: unknown keys (nearest known one offered;
  /// keys that transformers itself writes, such as architectures or torch_dtype, are accepted), types, ranges, head
  /// sizes that do not divide, model types that are not known. `locate` may tell where a key stands better than
  /// `where`.
  static ModelConfig from_json(const nlohmann::json& json, const std::string& where = "config.json",
                               const std::function<std::string(const std::string& key)>& locate = nullptr);
  /// Every key of the model_type, in published spelling.
  nlohmann::json to_json() const;
};

}  // namespace fox
