#include "train/run_directory.h"

#include <ATen/Parallel.h>
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <string_view>

#include "base/error.h"
#include "base/version.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::array<std::string_view, 6> kHarmless{
    "data.cache",         "train.device", "train.threads", "train.max_bad_steps", "train.activation_checkpointing",
    "train.deterministic"};

bool harmless(std::string_view key) {
  return key.starts_with("output.") || std::find(kHarmless.begin(), kHarmless.end(), key) != kHarmless.end();
}

std::string show(const json& table, const std::string& key) {
  return table.contains(key) ? table.at(key).dump() : "not set";
}

std::string utc_now() { return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr))); }

json read_run_json(const fs::path& path) {
  const auto run = json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  if (run.is_object() && run.contains("config") && run["config"].is_object()) return run;
  throw Error(fmt::format("{} is damaged", path.string()), "bring it back from a copy, or choose another output.dir");
}

std::string join(const std::vector<std::string>& parts) {
  std::string all;
  for (const auto& part : parts) all += (all.empty() ? "" : "; ") + part;
  return all;
}

}  // namespace

std::vector<std::string> config_differences(const json& there, const json& here) {
  std::vector<std::string> differences;
  for (const auto& [table, values] : here.items()) {
    const json other = there.value(table, json::object());
    json keys = values;  // the keys of both
    keys.update(other);
    for (const auto& [name, unused] : keys.items()) {
      const std::string key = table + "." + name;
      const std::string was = show(other, name), is = show(values, name);
      if (was != is && !harmless(key)) differences.push_back(fmt::format("{} is {} there and {} here", key, was, is));
    }
  }
  return differences;
}

RunDirectory::RunDirectory(const RunConfig& config, const std::optional<fs::path>& init_from)
    : path_(config.output.dir), init_from_(init_from), config_(config) {
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
  auto differences = config_differences(run_["config"], config.to_json());
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

void RunDirectory::begin(int64_t tokens, const json& data, int64_t parameters) {
  if (run_.contains("data") && run_["data"] != data) {
    throw Error(fmt::format("the text of the run in {} has changed since it was started: {} then, {} now",
                            path_.string(), run_["data"].dump(), data.dump()),
                "restore the text, or choose another output.dir");
  }
  const json session{{"started", utc_now()},          {"tokens", tokens},
                     {"version", version()},          {"commit", commit()},
                     {"torch", TORCH_VERSION},        {"threads", at::get_num_threads()},
                     {"device", config_.train.device}};
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
