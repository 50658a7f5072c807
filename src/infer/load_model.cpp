#include "infer/load_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <cstdio>

#include "base/error.h"
#include "base/files.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/hf_directory.h"

namespace fox::infer {
namespace {

namespace fs = std::filesystem;

fs::path without_trailing_slash(const fs::path& dir) {
  const fs::path whole = fs::absolute(dir).lexically_normal();
  return whole.has_filename() ? whole : whole.parent_path();
}

/// Tokens trained on when `dir` is a checkpoint folder of a run.
std::optional<int64_t> tokens_of_checkpoint(const fs::path& dir) {
  for (const checkpoint::CheckpointEntry& entry : checkpoint::list_checkpoints(dir.parent_path())) {
    if (entry.dir.filename() == dir.filename()) return entry.tokens;
  }
  return std::nullopt;
}

/// A model that somebody named has no other to take its place.
void check_undamaged(const fs::path& dir) {
  const std::string damage = checkpoint::has_checksums(dir) ? checkpoint::checkpoint_damage(dir) : "";
  if (damage.empty()) return;
  throw Error(fmt::format("the checkpoint {} is damaged: {}", dir.string(), damage),
              "name the run directory for its newest complete one; a folder changed on purpose has no checksums.json");
}

void warn(const std::string& line) { fmt::print(stderr, "warning: {}\n", line); }

}  // namespace

nlohmann::json ModelLocation::run_json() const {
  if (!run_dir) return nullptr;
  const fs::path path = *run_dir / "run.json";
  auto run = nlohmann::json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  if (run.is_object() && run.contains("config") && run["config"].is_object()) return run;
  throw Error(fmt::format("{} is damaged", path.string()), "bring it back from a copy");
}

std::optional<int64_t> ModelLocation::train_context() const {
  const nlohmann::json run = run_json();
  const nlohmann::json::json_pointer context("/config/data/context");
  if (!run.is_object() || !run.contains(context) || !run[context].is_number_integer()) return std::nullopt;
  return run[context].get<int64_t>();
}

ModelLocation locate_model(const fs::path& dir) {
  if (!fs::exists(dir)) {
    throw Error(fmt::format("there is no folder {}", dir.string()),
                "name a run directory of `fox train` or a Hugging Face model directory");
  }
  if (!fs::is_directory(dir)) {
    throw Error(fmt::format("{} is a file, not a folder", dir.string()), "name the folder that holds config.json");
  }
  const fs::path whole = without_trailing_slash(dir);
  ModelLocation location{dir, std::nullopt, std::nullopt};
  if (fs::exists(dir / "config.json")) {
    check_undamaged(dir);
    location.tokens = tokens_of_checkpoint(whole);
    const fs::path run_dir = whole.parent_path().parent_path();
    if (location.tokens && fs::exists(run_dir / "run.json")) location.run_dir = run_dir;
    return location;
  }
  if (!fs::exists(dir / "run.json") && !fs::exists(dir / "checkpoints")) {
    throw Error(fmt::format("{} holds no model: neither config.json nor run.json is there", dir.string()),
                "name a run directory of `fox train` or a Hugging Face model directory");
  }
  const std::optional<checkpoint::CheckpointEntry> newest = checkpoint::newest_checkpoint(dir / "checkpoints", warn);
  if (!newest) {
    throw Error(fmt::format("the run {} has no complete checkpoint yet", dir.string()),
                "wait for its first checkpoint, or run `fox train` again to continue it");
  }
  location.dir = newest->dir;
  if (fs::exists(dir / "run.json")) location.run_dir = dir;
  location.tokens = newest->tokens;
  return location;
}

data::Tokenizer load_tokenizer(const ModelLocation& location) {
  const fs::path file = data::Tokenizer::find_in(location.dir);
  if (!file.empty()) return data::Tokenizer::load(file);
  throw Error(fmt::format("{} holds neither tokenizer.json nor tokenizer.model", location.dir.string()),
              "copy the one that the model was trained with into that folder");
}

void load_weights(model::LanguageModel& model, const fs::path& folder) {
  const at::NoGradGuard no_grad;
  checkpoint::NamedTensors into;
  for (const nn::Parameter& parameter : model.parameters()) into.emplace(parameter.name, parameter.tensor);
  std::vector<std::string> tied;
  if (model.config().tie_word_embeddings) tied.emplace_back("lm_head.weight");
  checkpoint::load_into(checkpoint::read_weights(folder), into, folder.string(), tied);
}

LoadedModel load_model(const fs::path& dir, at::Device device, at::ScalarType compute) {
  ModelLocation location = locate_model(dir);
  const ModelConfig config =
      ModelConfig::from_json(checkpoint::read_config_json(location.dir), (location.dir / "config.json").string());
  data::Tokenizer tokenizer = load_tokenizer(location);
  if (tokenizer.vocab_size() > config.vocab_size) {
    throw Error(fmt::format("{} has {} ids, but the model's vocabulary has {}",
                            data::Tokenizer::find_in(location.dir).string(), tokenizer.vocab_size(), config.vocab_size),
                "use the tokenizer that the model was trained with");
  }
  model::LanguageModel model(config);
  load_weights(model, location.dir);
  model.set_requires_grad(false);
  model.to(device, at::kFloat);
  if (compute != at::kFloat) model.set_compute_dtype(compute);
  return {std::move(model), std::move(tokenizer), std::move(location)};
}

}  // namespace fox::infer
