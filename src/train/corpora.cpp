#include "train/corpora.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "data/token_folder.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> text_files(const std::vector<std::string>& sources, const char* key) {
  std::vector<fs::path> files;
  for (const auto& source : sources) {
    const fs::path path = source;
    if (!fs::exists(path)) throw Error(fmt::format("{}: there is no {}", key, source), "check the path");
    if (!fs::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file() && entry.path().extension() == ".txt") found.push_back(entry.path());
    }
    if (found.empty())
      throw Error(fmt::format("{}: {} holds no *.txt file", key, source), "name a folder of text files");
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  return files;
}

void split_off_last(CorpusFiles& files, double fraction) {
  const auto documents = static_cast<int64_t>(files.train.size());
  const auto held_out = static_cast<int64_t>(std::ceil(static_cast<double>(documents) * fraction));
  if (held_out >= documents) {
    throw Error(fmt::format("data.valid_fraction = {} of {} document{} leaves nothing to train on", fraction, documents,
                            documents == 1 ? "" : "s"),
                "a document is a file: cut the text into more files, or name held-out files in data.valid");
  }
  files.valid.assign(files.train.end() - held_out, files.train.end());
  files.train.resize(static_cast<size_t>(documents - held_out));
}

void check_nothing_shared(const CorpusFiles& files) {
  std::set<fs::path> places;
  std::map<uintmax_t, std::vector<fs::path>> by_size;
  for (const auto& file : files.train) {
    places.insert(fs::canonical(file));
    by_size[fs::file_size(file)].push_back(file);
  }
  const char* hint = "hold out text that the model does not learn from";
  for (const auto& file : files.valid) {
    if (places.contains(fs::canonical(file))) {
      throw Error(fmt::format("{} is both in data.train and in data.valid", file.string()), hint);
    }
    // Only files of one size can be copies, so hardly any need to be read.
    const auto same_size = by_size.find(fs::file_size(file));
    if (same_size == by_size.end() || same_size->first == 0) continue;
    const std::string sum = file_checksum(file);
    for (const auto& other : same_size->second) {
      if (file_checksum(other) != sum) continue;
      throw Error(fmt::format("{} of data.valid is a copy of {} of data.train", file.string(), other.string()), hint);
    }
  }
}

/// A hash of the texts that a store was made of, in their order.
std::string texts_checksum(const fs::path& store) {
  const auto attributes = nlohmann::json::parse(read_file(store / ".zattrs"));
  std::string sums;
  for (const auto& source : attributes.at("sources")) sums += source.at("checksum").get<std::string>();
  return bytes_checksum(sums);
}

}  // namespace

CorpusFiles find_corpus_files(const DataConfig& config) {
  CorpusFiles files{text_files(config.train, "data.train"), text_files(config.valid, "data.valid")};
  if (files.train.empty()) throw Error("data.train names no text", "for example: train = [\"corpus/train\"]");
  if (files.valid.empty() && config.valid_fraction > 0) split_off_last(files, config.valid_fraction);
  check_nothing_shared(files);
  return files;
}

data::Tokenizer make_tokenizer(const DataConfig& config) {
  if (config.tokenizer == "bytes") return data::Tokenizer::gpt2(0);
  if (config.tokenizer == "gpt2")
    return config.merges ? data::Tokenizer::gpt2(*config.merges) : data::Tokenizer::gpt2();
  return data::Tokenizer::load(config.tokenizer);
}

void fit_vocabulary(ModelConfig& config, const data::Tokenizer& tokenizer) {
  if (config.vocab_size == 0) config.vocab_size = tokenizer.vocab_size();
  if (config.vocab_size >= tokenizer.vocab_size()) return;
  throw Error(fmt::format("model.vocab_size = {} is smaller than the tokenizer's {} ids", config.vocab_size,
                          tokenizer.vocab_size()),
              "leave it out to take the tokenizer's");
}

Corpora open_corpora(const DataConfig& config, const data::Tokenizer& tokenizer, const fs::path& run_dir) {
  const CorpusFiles files = find_corpus_files(config);
  const fs::path folder = data::token_folder(config, tokenizer, run_dir);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw Error(fmt::format("cannot make {}: {}", folder.string(), error.message()), "choose another data.cache");
  Corpora corpora;
  corpora.identity["tokenizer"] = tokenizer.fingerprint();
  const auto build = [&](const std::vector<fs::path>& sources, const char* name) {
    const fs::path dir = folder / name;
    auto store = std::make_shared<const data::TokenStore>(data::build_token_store(sources, tokenizer, dir));
    corpora.identity[name] = {
        {"checksum", texts_checksum(dir)}, {"documents", store->num_documents()}, {"tokens", store->num_tokens()}};
    return store;
  };
  corpora.train = build(files.train, "train");
  if (!files.valid.empty()) corpora.valid = build(files.valid, "valid");
  return corpora;
}

}  // namespace fox::train
