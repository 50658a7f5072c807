#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <limits>
#include <string>

#include "infer/load_model.h"
#include "ops/device.h"

namespace fox::cli {

/// For whole numbers: refuses others than `least` to `most` ("must be at least 1").
CLI::Validator whole_number(int64_t least, int64_t most = std::numeric_limits<int64_t>::max());

/// For numbers: refuses others than those above 0.
CLI::Validator positive_number();

/// --threads: as many as [train] threads takes, 0 (one a core) among them.
void add_threads(CLI::App& command, int64_t& threads);

/// For --out: throws fox::Error when the file cannot be made, before anything is computed for it.
void check_out(const std::string& file);

/// --device, --precision and --threads, for commands that run a model.
struct ComputeOptions {
  std::string device_name = "cpu", precision = "float32";
  int64_t threads = 0;

  void add_to(CLI::App& command);
  /// Sets the number of threads of this process.
  void apply() const;
  at::Device device() const { return ops::open_device(device_name); }
  /// Of activations.
  at::ScalarType compute() const { return precision == "bf16" ? at::kBFloat16 : at::kFloat; }
  infer::LoadedModel load(const std::string& dir) const { return infer::load_model(dir, device(), compute()); }
};

/// What `command` says for its argument DIR.
inline constexpr const char* kModelHelp =
    "A run directory (its newest complete checkpoint) or a Hugging Face model directory";

}  // namespace fox::cli
