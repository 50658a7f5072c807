#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>

namespace fox::cli {

/// --device and --threads, for commands that run a model.
struct ComputeOptions {
  std::string device = "cpu";
  int64_t threads = 0;

  void add_to(CLI::App& command);
  /// Sets the number of threads of this process.
  void apply() const;
};

/// What `command` says for its argument DIR.
inline constexpr const char* kModelHelp =
    "A run directory (its newest complete checkpoint) or a Hugging Face model directory";

}  // namespace fox::cli
