#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "config/model_config.h"
#include "infer/load_model.h"
#include "model/language_model.h"

namespace fox::infer {

/// Parameters of one kind over all layers, e.g. all "attn.q_proj".
struct ModelPart {
  std::string name;
  int64_t parameters = 0;
  double flops_per_token = 0;  ///< forward: 2 a parameter, but nothing for looking up an embedding
};

/// What a model costs, by part.
struct ModelSummary {
  ModelConfig config;
  ModelLocation location;
  model::ParameterCount parameters;
  int64_t context = 0;           ///< tokens that FLOPs are counted at
  double flops_per_token = 0;    ///< forward, as arXiv 2503.02130, Table 6 counts them
  std::vector<ModelPart> parts;  ///< in order of first use; last: mixing of tokens, which has FLOPs and no parameters
};

/// Reads only config.json of what locate_model finds; no weights. `context`: default the training length, else
/// max_position_embeddings, else 16,384 (the paper's).
ModelSummary summarise_model(const std::filesystem::path& dir, std::optional<int64_t> context = {});
ModelSummary summarise_model(const ModelConfig& config, int64_t context);

nlohmann::json to_json(const ModelSummary& summary);

}  // namespace fox::infer
