#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "config/run_config.h"
#include "data/token_store.h"
#include "data/tokenizer.h"

namespace fox::train {

/// The text files of a run: what it learns from, and what it is measured on.
struct CorpusFiles {
  std::vector<std::filesystem::path> train, valid;
};

/// Finds the files that [data] names and splits off the last documents of `train` when valid_fraction asks for it.
/// Throws fox::Error when there is no text, when a file is in both sets (by place or by content: a validation split
/// shares nothing with training), or when there are too few documents to split.
CorpusFiles find_corpus_files(const DataConfig& config);

/// The tokenizer that [data] names: "gpt2" (with `merges`), "bytes", or a tokenizer.json.
data::Tokenizer make_tokenizer(const DataConfig& config);

/// Sets config.vocab_size to the tokenizer's when it was left out (0). Throws fox::Error when it is too small for it.
void fit_vocabulary(ModelConfig& config, const data::Tokenizer& tokenizer);

struct Corpora {
  std::shared_ptr<const data::TokenStore> train;
  std::shared_ptr<const data::TokenStore> valid;  ///< null when nothing is held out
  nlohmann::json identity;  ///< hashes of tokenizer and texts: what a continued run must find unchanged
};

/// Builds (or finds built) the token stores: below [data].cache when set, else in run_dir/tokens/{train,valid}.
Corpora open_corpora(const DataConfig& config, const data::Tokenizer& tokenizer, const std::filesystem::path& run_dir);

}  // namespace fox::train
