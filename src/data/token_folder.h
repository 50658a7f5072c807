#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "config/run_config.h"
#include "data/tokenizer.h"

namespace fox::data {

/// The token store (or array of LongCrawl64) that `sources` names, or "" when they are text. Throws Error when a store
/// is named beside other sources.
std::filesystem::path named_store(const std::vector<std::string>& sources);

/// Where the token stores `train` and `valid` of a run lie that are made of text: run_dir/tokens, or below [data] cache
/// when that is set. Runs that share a cache share their stores only if they read the same files with the same
/// tokenizer.
std::filesystem::path token_folder(const DataConfig& config, const Tokenizer& tokenizer,
                                   const std::filesystem::path& run_dir);

}  // namespace fox::data
