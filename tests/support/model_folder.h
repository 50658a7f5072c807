#pragma once

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/safetensors.h"
#include "data/tokenizer.h"
#include "model/language_model.h"

namespace fox::test {

inline void write_text(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

inline checkpoint::NamedTensors named_weights(const model::LanguageModel& model) {
  checkpoint::NamedTensors weights;
  for (const nn::Parameter& parameter : model.parameters()) weights.emplace(parameter.name, parameter.tensor.detach());
  return weights;
}

/// A Hugging Face model directory.
inline void write_model_folder(const std::filesystem::path& dir, const model::LanguageModel& model,
                               const data::Tokenizer& tokenizer) {
  write_text(dir / "config.json", model.config().to_json().dump());
  checkpoint::write_safetensors(dir / "model.safetensors", named_weights(model));
  tokenizer.save_in(dir);
}

/// A run directory with one complete checkpoint, as `fox train` leaves it; no metrics.
inline void write_run(const std::filesystem::path& dir, const model::LanguageModel& model,
                      const data::Tokenizer& tokenizer, int64_t context, int64_t tokens) {
  const nlohmann::json run = {{"config", {{"data", {{"context", context}}}, {"model", model.config().to_json()}}}};
  write_text(dir / "run.json", run.dump());
  const std::filesystem::path checkpoint = dir / "checkpoints" / checkpoint::checkpoint_name(tokens);
  write_model_folder(checkpoint, model, tokenizer);
  checkpoint::write_checksums(checkpoint);
}

}  // namespace fox::test
