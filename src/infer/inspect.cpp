#include "infer/inspect.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/hf_directory.h"

namespace fox::infer {
namespace {

constexpr int64_t kPaperContext = 16384;

/// "model.layers.3.attn.q_proj.weight" → "attn.q_proj": what is the same in all layers, without the tensor's own name.
std::string part_name(std::string name) {
  for (const std::string prefix : {"model.layers.", "model.", "backbone.layers.", "backbone."}) {
    if (!name.starts_with(prefix)) continue;
    name.erase(0, prefix.size());
    if (prefix.ends_with(".layers.")) name.erase(0, name.find('.') + 1);
    break;
  }
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? name : name.substr(0, dot);
}

}  // namespace

ModelSummary summarise_model(const ModelConfig& config, int64_t context) {
  if (context < 1) throw Error("the context length must be at least 1 token", "set it with --context");
  const model::LanguageModel model(config);
  ModelSummary summary{config, {}, model.count_parameters(), context, model.flops_per_token(context), {}};
  double of_parameters = 0;
  for (const nn::Parameter& parameter : model.parameters()) {
    const std::string name = part_name(parameter.name);
    auto part = std::find_if(summary.parts.begin(), summary.parts.end(), [&](const auto& p) { return p.name == name; });
    if (part == summary.parts.end()) part = summary.parts.insert(part, {name, 0, 0});
    part->parameters += parameter.tensor.numel();
    // Tied, the table is read as an embedding and multiplied with as the LM head.
    if (name == "embeddings" && !config.tie_word_embeddings) continue;
    const double flops = 2.0 * static_cast<double>(parameter.tensor.numel());
    part->flops_per_token += flops;
    of_parameters += flops;
  }
  summary.parts.push_back({"mixing of tokens", 0, summary.flops_per_token - of_parameters});
  return summary;
}

ModelSummary summarise_model(const std::filesystem::path& dir, std::optional<int64_t> context) {
  ModelLocation location = locate_model(dir);
  const ModelConfig config =
      ModelConfig::from_json(checkpoint::read_config_json(location.dir), (location.dir / "config.json").string());
  if (!context) context = location.train_context();
  if (!context) context = config.max_position_embeddings.value_or(kPaperContext);
  ModelSummary summary = summarise_model(config, *context);
  summary.location = std::move(location);
  return summary;
}

nlohmann::json to_json(const ModelSummary& summary) {
  nlohmann::json parts = nlohmann::json::array();
  for (const ModelPart& part : summary.parts) {
    parts.push_back({{"name", part.name}, {"parameters", part.parameters}, {"flops_per_token", part.flops_per_token}});
  }
  return {{"dir", summary.location.dir.string()},
          {"trained_tokens", summary.location.tokens ? nlohmann::json(*summary.location.tokens) : nlohmann::json()},
          {"config", summary.config.to_json()},
          {"parameters", summary.parameters.total},
          {"non_embedding_parameters", summary.parameters.non_embedding},
          {"context", summary.context},
          {"flops_per_token", summary.flops_per_token},
          {"parts", parts}};
}

}  // namespace fox::infer
