#include "config/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/nearest.h"
#include "config/key_reader.h"

namespace fox {
namespace {

// Far beyond any model, but small enough that products of three sizes stay within int64.
const Range kCount = Range::between(1, 1 << 20);
const Range kVocab = Range::between(1, 1 << 30);

const std::vector<std::string> kGateNames{"full", "bias_only", "fixed", "none"};

const std::vector<std::string> kModelTypes{"forgetting_transformer-project_fox", "transformer-project_fox"};

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

// A config.json key in both directions. `visit` below lists the keys once; reading and writing follow that list.
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
    if (value != built) reader.fail(key, fmt::format("must be {}", built), "the other value is not supported");
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
  key("hidden_ratio", c.hidden_ratio, Range::between(1e-3, 1e3));
  key("intermediate_size", c.intermediate_size, kCount);
  key.choice("hidden_act", act, {"swish", "silu"});  // two names of one function
  key("norm_eps", c.norm_eps, Range::at_least(0));
  key.only("elementwise_affine", true);
  key.ignored("fuse_norm", true);
}

template <typename Visitor>
void visit_attention(ModelConfig& c, Visitor& key) {
  key("num_heads", c.num_heads, kCount);
  key("num_kv_heads", c.num_kv_heads, kCount);
  key("window_size", c.window_size, Range::at_least(1));
  key("max_position_embeddings", c.max_position_embeddings, Range::at_least(1));
  key("use_rope", c.use_rope);
  key("rope_base", c.rope_base, Range::above(0));
  key.only("attention_bias", false);
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
void visit(ModelConfig& c, Visitor& key) {
  visit_common(c, key);
  visit_mlp(c, key);
  visit_attention(c, key);
  if (c.kind() == "forgetting_transformer") visit_fox(c, key);
}

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
                fmt::format("= {} is above decay_time_max = {}", *c.decay_time_min, *c.decay_time_max));
  }
}

// transformers names the class that a config belongs to.
std::string architecture(const std::string& kind) {
  return kind == "forgetting_transformer" ? "ForgettingTransformerForCausalLM" : "TransformerForCausalLM";
}

}  // namespace

std::string ModelConfig::kind() const { return model_type.substr(0, model_type.find('-')); }

int64_t ModelConfig::mlp_width() const {
  if (intermediate_size) return *intermediate_size;
  const auto wanted = static_cast<int64_t>(static_cast<double>(hidden_size) * hidden_ratio * 2 / 3);
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
  config.use_rope = config.kind() == "transformer";
  Reading reading{reader};
  visit(config, reading);
  reader.accept(kTransformersKeys);
  reader.finish();
  check_attention(config, reader);
  check_gate(config, reader);
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
