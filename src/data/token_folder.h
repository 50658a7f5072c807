#pragma once

#include <filesystem>

#include "config/run_config.h"
#include "data/tokenizer.h"

namespace fox::data {

/// Where the token stores `train` and `valid` of a run lie: run_dir/tokens, or below [data] cache when that is set.
/// Runs that share a cache share their stores only if they read the same files with the same tokenizer.
std::filesystem::path token_folder(const DataConfig& config, const Tokenizer& tokenizer,
                                   const std::filesystem::path& run_dir);

}  // namespace fox::data
