#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "config/run_config.h"
#include "data/token_store.h"
#include "data/tokenizer.h"
#include "data/training_stream.h"

namespace fox::train {

/// What one half of a run's data is read from: text, or tokens that are ready.
struct CorpusPart {
  std::vector<std::filesystem::path> files;  ///< text and JSON lines
  std::filesystem::path store;               ///< or a token store, or an array of LongCrawl64; empty when there is none
  int64_t bytes = 0;                         ///< on disk: of the files; of a store, two a token
  bool empty() const { return files.empty() && store.empty(); }
};

/// What a run learns from, and what it is measured on.
struct CorpusFiles {
  CorpusPart train, valid;
};

/// Finds what [data] names and splits off the last files of `train` when valid_fraction asks for it.
/// Throws fox::Error when there is no text, when a file is in both sets (by place or by content: a validation split
/// shares nothing with training), or when there are too few files to split.
CorpusFiles find_corpus_files(const DataConfig& config);

/// The tokenizer that [data] names: "gpt2" (with `merges`), "gpt2-json", "bytes", a tokenizer.json, or SentencePiece's
/// .model file.
data::Tokenizer make_tokenizer(const DataConfig& config);

/// Throws fox::Error when the model at `dir`, whose weights a run is to start from, has another tokenizer.
void check_model_tokenizer(const std::filesystem::path& dir, const data::Tokenizer& tokenizer);

/// Sets config.vocab_size to the tokenizer's when it was left out (0). Throws fox::Error when it is too small for it.
void fit_vocabulary(ModelConfig& config, const data::Tokenizer& tokenizer);

struct Corpora {
  std::unique_ptr<const data::TrainingStream> train;
  std::shared_ptr<const data::TokenStore> valid;  ///< null when nothing is held out
  nlohmann::json identity;  ///< hashes of tokenizer and texts: what a continued run must find unchanged
};

/// Opens the stores and arrays that [data] names and builds (or finds built) those of text: below [data].cache when
/// set, else in run_dir/tokens/{train,valid}. Throws fox::Error when a store is of another tokenizer, and when
/// LongCrawl64, which is read once, holds fewer tokens than the run asks for.
Corpora open_corpora(const RunConfig& config, const data::Tokenizer& tokenizer, const std::filesystem::path& run_dir);

}  // namespace fox::train
