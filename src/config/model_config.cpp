#include "config/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <map>

#include "base/error.h"
#include "base/nearest.h"
#include "config/key_reader.h"
#include "config/model_keys.h"

namespace fox {
namespace {

const std::vector<std::string> kModelTypes{"forgetting_transformer-project_fox",
                                           "transformer-project_fox",
                                           "hgrn2-project_fox",
                                           "delta_net-project_fox",
                                           "mamba2-project_fox",
                                           "samba-project_fox"};

// What transformers itself writes into a config.json; none of it changes what a model computes.
const std::vector<std::string> kTransformersKeys{"architectures",
                                                 "auto_map",
                                                 "torch_dtype",
                                                 "dtype",
                                                 "transformers_version",
                                                 "_name_or_path",
                                                 "_commit_hash",
                                                 "attn_implementation",
                                                 "_attn_implementation_autoset",
                                                 "pad_token_id",
                                                 "sep_token_id",
                                                 "decoder_start_token_id",
                                                 "return_dict",
                                                 "output_hidden_states",
                                                 "output_attentions",
                                                 "use_cache",
                                                 "torchscript",
                                                 "use_bfloat16",
                                                 "is_decoder",
                                                 "is_encoder_decoder",
                                                 "chunk_size_feed_forward",
                                                 "id2label",
                                                 "label2id",
                                                 "problem_type",
                                                 "pruned_heads",
                                                 "tie_encoder_decoder",
                                                 "cross_attention_hidden_size",
                                                 "add_cross_attention",
                                                 "finetuning_task",
                                                 "task_specific_params",
                                                 "tokenizer_class",
                                                 "prefix",
                                                 "max_length",
                                                 "min_length",
                                                 "do_sample",
                                                 "early_stopping",
                                                 "num_beams",
                                                 "num_beam_groups",
                                                 "diversity_penalty",
                                                 "temperature",
                                                 "top_k",
                                                 "top_p",
                                                 "typical_p",
                                                 "repetition_penalty",
                                                 "length_penalty",
                                                 "no_repeat_ngram_size",
                                                 "encoder_no_repeat_ngram_size",
                                                 "bad_words_ids",
                                                 "num_return_sequences",
                                                 "output_scores",
                                                 "return_dict_in_generate",
                                                 "forced_bos_token_id",
                                                 "forced_eos_token_id",
                                                 "remove_invalid_values",
                                                 "exponential_decay_length_penalty",
                                                 "suppress_tokens",
                                                 "begin_suppress_tokens",
                                                 "tf_legacy_loss"};

void check_attention(const ModelConfig& c, const KeyReader& reader) {
  if (c.hidden_size % c.num_heads != 0) {
    reader.fail("num_heads", fmt::format("= {} does not divide hidden_size = {}", c.num_heads, c.hidden_size),
                "the heads share the width equally");
  }
  if (c.num_heads % c.kv_heads() != 0) {
    reader.fail("num_kv_heads", fmt::format("= {} does not divide num_heads = {}", c.kv_heads(), c.num_heads),
                "each key-value head serves the same number of query heads");
  }
  if (c.use_rope && c.head_dim() % 2 != 0) {
    reader.fail("use_rope", fmt::format("needs an even head size, not {}", c.head_dim()),
                "the head size is hidden_size / num_heads");
  }
}

void check_gate(const ModelConfig& c, const KeyReader& reader) {
  if (!c.fgate_bias_init) return;
  if (!c.decay_time_min || !c.decay_time_max) {
    reader.fail("fgate_bias_init", "needs decay_time_min and decay_time_max",
                "the memory lengths, in tokens, of the first and the last head");
  }
  if (*c.decay_time_min > *c.decay_time_max) {
    reader.fail("decay_time_min",
                fmt::format("= {} is above decay_time_max = {}", *c.decay_time_min, *c.decay_time_max),
                "decay times are spread between the two");
  }
}

void check_hgrn2(const ModelConfig& c, const KeyReader& reader) {
  if (c.hidden_size % c.expand_ratio != 0) {
    reader.fail("expand_ratio", fmt::format("= {} does not divide hidden_size = {}", c.expand_ratio, c.hidden_size),
                "it is the number of channels of a head; the heads share the width equally");
  }
  if (c.apply_lower_bound && !c.use_lower_bound) {
    reader.fail("apply_lower_bound", "needs use_lower_bound", "set use_lower_bound to true");
  }
}

void check_mamba2(const ModelConfig& c, const KeyReader& reader) {
  if (c.num_heads * c.ssm_head_dim != c.inner_width()) {
    reader.fail("num_heads",
                fmt::format("* head_dim = {} * {} is not expand * hidden_size = {}", c.num_heads, c.ssm_head_dim,
                            c.inner_width()),
                "the heads share the inner width equally");
  }
  if (c.time_step_limit.size() != 2 || c.time_step_limit[0] > c.time_step_limit[1]) {
    reader.fail("time_step_limit", "must be two numbers, the smaller first", "the default is [0, Infinity]");
  }
}

void check_time_steps(const ModelConfig& c, const KeyReader& reader) {
  if (c.time_step_min > c.time_step_max) {
    reader.fail("time_step_min", fmt::format("= {} is above time_step_max = {}", c.time_step_min, c.time_step_max),
                "time steps are drawn between the two");
  }
}

void check(const ModelConfig& c, const KeyReader& reader) {
  const std::string kind = c.kind();
  if (kind == "hgrn2") return check_hgrn2(c, reader);
  if (kind == "mamba2" || kind == "samba") check_time_steps(c, reader);
  if (kind == "mamba2") return check_mamba2(c, reader);
  if (kind == "samba" && !c.hybrid_attention) return;
  check_attention(c, reader);
  check_gate(c, reader);
}

// transformers names the class that a config belongs to.
std::string architecture(const std::string& kind) {
  static const std::map<std::string, std::string> names{{"forgetting_transformer", "ForgettingTransformer"},
                                                        {"transformer", "Transformer"},
                                                        {"hgrn2", "HGRN2"},
                                                        {"delta_net", "DeltaNet"},
                                                        {"mamba2", "Mamba2"},
                                                        {"samba", "Samba"}};
  return names.at(kind) + "ForCausalLM";
}

// The class defaults that differ from model type to model type.
void set_defaults(ModelConfig& c) {
  const std::string kind = c.kind();
  c.use_rope = kind == "transformer" || kind == "samba";
  if (kind == "delta_net") c.num_heads = 16;
  if (kind == "mamba2") {
    c.num_heads = 64;
    c.num_hidden_layers = 48;
    c.norm_eps = 1e-5;
    c.initializer_range = 0.1;
  }
  if (kind == "samba") {
    c.hidden_size = 2304;
    c.num_hidden_layers = 18;
    c.state_size = 16;
    c.norm_eps = 1e-5;
  }
}

// Infinity bounds as little as the largest number, which JSON can write.
void make_finite(std::vector<double>& limits) {
  for (double& limit : limits) limit = std::min(limit, std::numeric_limits<double>::max());
}

}  // namespace

std::string ModelConfig::kind() const { return model_type.substr(0, model_type.find('-')); }

int64_t ModelConfig::mlp_width(int64_t layer) const {
  if (kind() == "mamba2") return 0;
  const bool samba = kind() == "samba";
  // Samba's class writes the inner width of its Mamba layers under this key; its MLPs follow the ratios then.
  if (intermediate_size && !(samba && *intermediate_size == inner_width())) return *intermediate_size;
  const double ratio = !samba ? hidden_ratio : is_samba_attention(layer) ? attn_hidden_ratio : mamba_hidden_ratio;
  const auto wanted = static_cast<int64_t>(static_cast<double>(hidden_size) * ratio * 2 / 3);
  return 256 * ((wanted + 255) / 256);
}

bool ModelConfig::is_built(const std::string& model_type) {
  return std::any_of(kModelTypes.begin(), kModelTypes.end(), [&](const std::string& type) {
    return type.substr(0, type.find('-')) == model_type.substr(0, model_type.find('-'));
  });
}

ModelConfig ModelConfig::from_json(const nlohmann::json& json, const std::string& where,
                                   const std::function<std::string(const std::string& key)>& locate) {
  KeyReader reader(json, where);
  if (locate) reader.set_locator(locate);
  ModelConfig config;
  reader.read("model_type", config.model_type);
  if (!is_built(config.model_type)) {
    reader.fail("model_type", fmt::format("\"{}\" is not a model type that is built", config.model_type),
                suggest(config.model_type, kModelTypes));
  }
  set_defaults(config);
  Reading reading{reader};
  visit(config, reading);
  reader.accept(kTransformersKeys);
  if (config.kind() == "mamba2") reader.accept({"intermediate_size"});  // there is no MLP
  reader.finish();
  make_finite(config.time_step_limit);
  check(config, reader);
  return config;
}

nlohmann::json ModelConfig::to_json() const {
  nlohmann::json json{{"model_type", model_type}, {"architectures", {architecture(kind())}}, {"use_cache", true}};
  ModelConfig copy = *this;
  Writing writing{json};
  visit(copy, writing);
  return json;
}

}  // namespace fox
