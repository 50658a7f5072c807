#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"

namespace fox::checkpoint {

// A Hugging Face model directory: config.json, model.safetensors (or shards with model.safetensors.index.json),
// tokenizer.json or tokenizer.model.

/// config.json as it stands. Throws fox::Error naming the file when it is missing or not JSON (Infinity is accepted).
nlohmann::json read_config_json(const std::filesystem::path& dir);

/// All weights, from one file or from the shards that the index lists.
NamedTensors read_weights(const std::filesystem::path& dir);

/// Copies `from` into the tensors of `into` (cast to their dtype). Missing, extra and wrongly shaped tensors are an
/// error that lists all of them at once. `tied` names may be missing on either side.
void load_into(const NamedTensors& from, const NamedTensors& into, const std::string& where,
               const std::vector<std::string>& tied = {});

}  // namespace fox::checkpoint
