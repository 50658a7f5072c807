#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "data/tokenizer.h"
#include "model/language_model.h"

namespace fox::infer {

/// Where a model argument of the command line leads: a Hugging Face directory, and the run it belongs to if it has one.
struct ModelLocation {
  std::filesystem::path dir;                     ///< holds config.json and the weights
  std::optional<std::filesystem::path> run_dir;  ///< holds run.json and metrics.jsonl
  std::optional<int64_t> tokens;                 ///< tokens trained on, from the checkpoint's name

  /// run.json, or null when there is no run. Throws fox::Error when it is damaged.
  nlohmann::json run_json() const;
  /// T that the run trained at (run.json), or nothing.
  std::optional<int64_t> train_context() const;
};

/// `dir` is a Hugging Face directory, a checkpoint folder, or a run directory, which stands for its newest complete
/// checkpoint. Throws fox::Error when there is no such folder, no model in it, no complete checkpoint yet, or when the
/// folder has checksums.json and its files other sums.
ModelLocation locate_model(const std::filesystem::path& dir);

/// The tokenizer beside the weights. Throws fox::Error when it is missing or damaged.
data::Tokenizer load_tokenizer(const ModelLocation& location);

/// Weights from `folder` (ModelLocation::dir), which must fit `model`. Throws fox::Error naming tensors that do not.
void load_weights(model::LanguageModel& model, const std::filesystem::path& folder);

/// A model that is ready to read tokens, with its tokenizer.
struct LoadedModel {
  model::LanguageModel model;
  data::Tokenizer tokenizer;
  ModelLocation location;
};

/// Loads what locate_model finds onto `device`, parameters in float32 and activations in `compute`, as training has
/// them. Throws fox::Error naming files and tensors that are missing or damaged, or when the tokenizer has more ids
/// than the model.
LoadedModel load_model(const std::filesystem::path& dir, at::Device device = at::kCPU,
                       at::ScalarType compute = at::kFloat);

}  // namespace fox::infer
