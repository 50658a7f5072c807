#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

#include "infer/load_model.h"
#include "ops/device.h"

namespace fox::cli {

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
