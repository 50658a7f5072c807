#include "train/run_directory.h"

#include <ATen/Parallel.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <array>
#include <ctime>

#include "base/error.h"
#include "base/version.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::array kHarmless{"device",        "threads",         "max_bad_steps",  "activation_checkpointing",
                               "deterministic", "shard_optimizer", "rank_timeout_s", "sequence_ranks",
                               "cuda_graph"};  // of train

void leave_out_harmless(json& config) {
  config.erase("output");
  if (config.contains("data")) config["data"].erase("cache");
  for (const char* key : kHarmless) {
    if (config.contains("train")) config["train"].erase(key);
  }
}

std::string show(const json& config, const std::string& table, const std::string& key) {
  const bool there = config.contains(table) && config.at(table).contains(key);
  return there ? config.at(table).at(key).dump() : "not set";
}

std::string utc_now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

json read_run_json(const fs::path& path) {
  auto run = json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  if (run.is_object() && run.contains("config") && run["config"].is_object()) return run;
  throw Error(fmt::format("{} is damaged", path.string()), "bring it back from a copy, or choose another output.dir");
}

std::string join(const std::vector<std::string>& parts) {
  std::string all;
  for (const auto& part : parts) all += (all.empty() ? "" : "; ") + part;
  return all;
}

/// The recorded configuration of a run, with the defaults of keys that the fox of that time did not know yet.
json with_defaults(const json& recorded) {
  json filled = RunConfig().to_json();
  filled.erase("model");
  for (const auto& [table, keys] : recorded.items()) filled[table].update(keys);
  return filled;
}

}  // namespace

std::vector<std::string> all_differences(const json& there, const json& here, const std::string& there_name,
                                         const std::string& here_name) {
  std::vector<std::string> differences;
  json tables = here;  // those of both
  tables.update(there);
  for (const auto& [table, unused] : tables.items()) {
    json keys = json::object();
    for (const json* config : {&there, &here}) {
      if (config->contains(table)) keys.update(config->at(table));
    }
    for (const auto& [name, also_unused] : keys.items()) {
      const std::string was = show(there, table, name), is = show(here, table, name);
      if (was != is)
        differences.push_back(fmt::format("{}.{} is {} {} and {} {}", table, name, was, there_name, is, here_name));
    }
  }
  return differences;
}

std::vector<std::string> config_differences(json there, json here) {
  leave_out_harmless(there);
  leave_out_harmless(here);
  return all_differences(there, here, "there", "here");
}

RunDirectory::RunDirectory(const RunConfig& config, const std::optional<fs::path>& init_from)
    : path_(config.output.dir), init_from_(init_from), config_(config), made_(!fs::exists(path_)) {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error) {
    throw Error(fmt::format("cannot make the run directory {}: {}", path_.string(), error.message()),
                "choose another output.dir");
  }
  lock_ = std::make_unique<DirectoryLock>(path_);
  const fs::path file = path_ / "run.json";
  if (!fs::exists(file)) return;

  run_ = read_run_json(file);
  auto differences = config_differences(with_defaults(run_["config"]), config.to_json());
  const std::string recorded = run_.value("init_from", "");
  if (init_from && init_from->string() != recorded) {
    differences.push_back(fmt::format("it started from {} there and {} here",
                                      recorded.empty() ? "random weights" : recorded, init_from->string()));
  }
  if (!differences.empty()) {
    throw Error(fmt::format("{} holds a run with another configuration: {}", path_.string(), join(differences)),
                fmt::format("choose another output.dir, or continue that run with: fox train {}",
                            (path_ / "run.toml").string()));
  }
  if (!recorded.empty()) init_from_ = recorded;
}

RunDirectory::~RunDirectory() {
  if (!made_ || !run_.is_null()) return;
  std::error_code not_empty;  // then it stays
  for (const char* name : {"checkpoints", "tokens", ".lock", ""}) fs::remove(path_ / name, not_empty);
}

void RunDirectory::begin(int64_t tokens, const json& data, int64_t parameters, int ranks) {
  if (run_.contains("data") && run_["data"] != data) {
    throw Error(fmt::format("the text of the run in {} has changed since it was started: {} then, {} now",
                            path_.string(), run_["data"].dump(), data.dump()),
                "restore the text, or choose another output.dir");
  }
  const json session{{"started", utc_now()},           {"tokens", tokens},
                     {"version", version()},           {"commit", commit()},
                     {"torch", TORCH_VERSION},         {"threads", at::get_num_threads()},
                     {"device", config_.train.device}, {"ranks", ranks}};
  if (run_.is_null()) {
    run_ = {{"version", version()},           {"commit", commit()},         {"torch", TORCH_VERSION},
            {"started", session["started"]},  {"seed", config_.train.seed}, {"threads", session["threads"]},
            {"device", config_.train.device}, {"sessions", json::array()}};
    if (init_from_) run_["init_from"] = init_from_->string();
  }
  run_["config"] = config_.to_json();
  run_["data"] = data;
  run_["parameters"] = parameters;
  run_["sessions"].push_back(session);
  write_file_atomically(path_ / "run.toml", config_.to_toml());
  write_file_atomically(path_ / "run.json", run_.dump(2) + "\n");
}

}  // namespace fox::train
