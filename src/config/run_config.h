#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "config/model_config.h"

namespace fox {

/// [data]
struct DataConfig {
  std::string format = "text";     // or "longcrawl64": train and valid are its zarr arrays
  std::vector<std::string> train;  // text or JSON lines, files or folders; or one token store
  std::vector<std::string> valid;  // held-out text; or a share of the training files, below
  double valid_fraction = 0;       // share of the files of `train`, the last, kept out when `valid` is empty
  std::string tokenizer = "gpt2";  // "gpt2", "gpt2-json" (LongCrawl64's), "bytes", a tokenizer.json, a .model file
  std::optional<int64_t> merges;   // only the first N merges of gpt2
  int64_t context = 1024;          // training context length T
  std::string cache = "";          // where token stores go; default <output.dir>/tokens
};

/// [train]; lengths of schedules are in tokens.
struct TrainConfig {
  uint64_t seed = 0;
  int64_t batch_tokens = 0;        // tokens a step; default context
  int64_t micro_batch_tokens = 0;  // tokens a forward pass; default batch_tokens
  int64_t max_tokens = 0;          // required
  int64_t warmup_tokens = 0;
  double lr = 1e-3;
  double min_lr = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, max_grad_norm = 1.0;
  std::string precision = "float32";              // or "bf16" (float32 masters), "float64"
  std::string activation_checkpointing = "none";  // or "mlp", "full": what is computed again instead of being kept
  bool deterministic = false;                     // the same bits each time on a GPU too
  int64_t threads = 0;                            // 0: all cores
  std::string device = "cpu";
  std::string cuda_graph = "auto";  // "on", "off": whether one GPU repeats the step as a CUDA graph
  int64_t max_bad_steps = 5;        // stop after this many consecutive non-finite steps
  // Of several ranks (torchrun):
  bool shard_optimizer = true;   // each keeps the optimizer's state of its share of the parameters only
  int64_t rank_timeout_s = 300;  // one that is waited for longer is at fault, and all end
  int64_t sequence_ranks = 1;    // so many ranks, neighbours, hold a context together
};

/// [eval]
struct EvalConfig {
  int64_t interval_tokens = 0;  // 0: only at the end
  int64_t max_tokens = 65536;   // held-out tokens an in-training evaluation reads
  std::string sample_prompt = "";
  int64_t sample_tokens = 0;  // 0: no sample text
};

/// [output]
struct OutputConfig {
  std::string dir;  // required: the run directory
  int64_t log_interval_steps = 10;
  int64_t checkpoint_interval_tokens = 0;  // 0: only at the end
  int64_t keep_last = 2;
  int64_t keep_every_tokens = 0;  // permanent checkpoints; 0: none
  bool tensorboard = true;
};

/// A run file: tables [model] [data] [train] [eval] [output]. [model] holds config.json keys (vocab_size may be left
/// out: model.vocab_size is then 0, and training sets it to the tokenizer's), or `config = "file.json"` and keys that
/// override it.
struct RunConfig {
  ModelConfig model;  // vocab_size 0: left out
  DataConfig data;
  TrainConfig train;
  EvalConfig eval;
  OutputConfig output;

  /// Reads FILE.toml and applies `--set table.key=value` in order. Throws UsageError (exit 2) for a file that does not
  /// parse or keys, types and ranges that are wrong, naming the key, the line where there is one, and the nearest known
  /// key. Defaults that follow from other keys (train.batch_tokens, …) are filled in. A value of `--set` is read as
  /// TOML's, and a bare word as a string.
  static RunConfig load(const std::filesystem::path& toml, const std::vector<std::string>& overrides = {});
  nlohmann::json to_json() const;
  /// As TOML that load() reads back to the same configuration (--print-config).
  std::string to_toml() const;
};

}  // namespace fox
