#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"
#include "checkpoint/checkpoint_folder.h"
#include "config/run_config.h"
#include "train/run.h"

// A whole training run that takes about a second.
namespace fox::test {

/// Text of `bytes` bytes: random words, so that no two contexts are alike.
inline std::string random_text(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::string text;
  while (text.size() < bytes) {
    for (uint64_t letters = 1 + random() % 8; letters > 0; --letters) text += static_cast<char>('a' + random() % 26);
    text += random() % 12 == 0 ? '\n' : ' ';
  }
  text.resize(bytes);
  return text;
}

/// 40 steps of 2 x 2 contexts of 16 bytes, which is three times through the training text and a bit: epochs begin and
/// end in the middle of steps. A checkpoint every fourth step; evaluation and a sample every 8 steps.
inline RunConfig small_run(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder / "text");
  for (int i = 0; i < 3; ++i) {
    std::ofstream(folder / "text" / (std::to_string(i) + ".txt"))
        << random_text(300 + 7 * static_cast<size_t>(i), 10 + i);
  }
  std::ofstream(folder / "valid.txt") << random_text(400, 3);
  RunConfig config;
  config.model.vocab_size = 0;
  config.model.hidden_size = 16;
  config.model.num_hidden_layers = 1;
  config.model.num_heads = 2;
  config.model.intermediate_size = 24;
  config.model.use_k_shift = config.model.use_v_shift = config.model.qk_norm = true;
  config.model.use_output_gate = config.model.use_output_norm = true;
  config.data.train = {(folder / "text").string()};
  config.data.valid = {(folder / "valid.txt").string()};
  config.data.tokenizer = "bytes";
  config.data.context = 16;
  config.train.seed = 5;
  config.train.batch_tokens = 64;
  config.train.micro_batch_tokens = 32;
  config.train.max_tokens = 40 * 64;
  config.train.warmup_tokens = 4 * 64;
  config.train.lr = 1e-2;
  config.train.threads = 1;
  config.eval.interval_tokens = 8 * 64;
  config.eval.max_tokens = 256;
  config.eval.sample_prompt = "a";
  config.eval.sample_tokens = 8;
  config.output.dir = (folder / "run").string();
  config.output.log_interval_steps = 1;
  config.output.checkpoint_interval_tokens = 4 * 64;
  config.output.keep_last = 3;
  return config;
}

inline std::filesystem::path checkpoints_of(const RunConfig& config) {
  return std::filesystem::path(config.output.dir) / "checkpoints";
}

/// What a run ends with: every file of its newest checkpoint, as bytes.
inline std::map<std::string, std::string> final_state(const RunConfig& config) {
  const auto newest = checkpoint::newest_checkpoint(checkpoints_of(config));
  std::map<std::string, std::string> files;
  if (!newest) return files;
  for (const auto& entry : std::filesystem::directory_iterator(newest->dir)) {
    files[entry.path().filename().string()] = read_file(entry.path());
  }
  return files;
}

/// The lines of metrics.jsonl without what a clock decides.
inline std::vector<nlohmann::json> metrics_of(const RunConfig& config) {
  std::istringstream text(read_file(std::filesystem::path(config.output.dir) / "metrics.jsonl"));
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(text, line);) {
    lines.push_back(nlohmann::json::parse(line));
    lines.back().erase("time");
    lines.back().erase("tokens_per_s");
    lines.back().erase("data_wait");
  }
  return lines;
}

}  // namespace fox::test
