#include "train/corpora.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/files.h"
#include "data/batch_stream.h"
#include "data/corpus_files.h"
#include "data/longcrawl64.h"
#include "data/token_folder.h"
#include "infer/load_model.h"
#include "train/setup.h"

namespace fox::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

CorpusPart find_part(const DataConfig& config, const std::vector<std::string>& sources, const char* key) {
  CorpusPart part;
  if (sources.empty()) return part;
  try {
    part.store = config.format == "longcrawl64" ? fs::path(sources.front()) : data::named_store(sources);
    if (!part.store.empty() && !fs::is_directory(part.store)) {
      throw Error(fmt::format("there is no folder {}", part.store.string()),
                  "name LongCrawl64's train.zarr, or its heldout.zarr for data.valid");
    }
    if (part.store.empty()) part.files = data::find_text_files({sources.begin(), sources.end()});
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", key, error.what()), error.hint());
  }
  for (const auto& file : part.files) part.bytes += static_cast<int64_t>(fs::file_size(file));
  if (part.store.empty()) return part;
  if (config.format == "text" && data::is_longcrawl64(part.store)) {
    throw Error(fmt::format("{}: {} is a zarr array and no text", key, part.store.string()),
                "set data.format = \"longcrawl64\"");
  }
  const auto shape = data::ZarrMeta::read(config.format == "text" ? part.store / "tokens" : part.store).shape;
  part.bytes = 2;
  for (const int64_t size : shape) part.bytes *= size;
  return part;
}

void split_off_last(CorpusFiles& files, double fraction) {
  auto& train = files.train.files;
  const char* hint = "cut the text into more files, or name held-out files in data.valid";
  if (!files.train.store.empty())
    throw Error(fmt::format("data.valid_fraction cannot split the token store {}", files.train.store.string()), hint);
  const auto documents = static_cast<int64_t>(train.size());
  const auto held_out = static_cast<int64_t>(std::ceil(static_cast<double>(documents) * fraction));
  if (held_out >= documents) {
    throw Error(fmt::format("data.valid_fraction = {} of {} file{} leaves nothing to train on", fraction, documents,
                            documents == 1 ? "" : "s"),
                hint);
  }
  files.valid.files.assign(train.end() - held_out, train.end());
  train.resize(static_cast<size_t>(documents - held_out));
  for (const auto& file : files.valid.files) files.valid.bytes += static_cast<int64_t>(fs::file_size(file));
  files.train.bytes -= files.valid.bytes;
}

/// A text that a part was made of.
struct Source {
  fs::path path;
  uintmax_t size;
  std::string checksum;  // "": not known yet
};

std::vector<Source> sources_of(const CorpusPart& part) {
  std::vector<Source> sources;
  for (const auto& file : part.files) sources.push_back({fs::canonical(file), fs::file_size(file), ""});
  if (part.store.empty()) return sources;
  sources.push_back({fs::canonical(part.store), 0, ""});
  const fs::path attributes = part.store / ".zattrs";
  if (!fs::exists(attributes)) return sources;
  const json root = json::parse(read_file(attributes), nullptr, false);
  if (!root.is_object()) return sources;
  for (const json& source : root.value("sources", json::array())) {
    sources.push_back({source.value("path", ""), source.value("size", uintmax_t{0}), source.value("checksum", "")});
  }
  return sources;
}

void check_nothing_shared(const CorpusFiles& files) {
  std::map<uintmax_t, std::vector<Source>> by_size;
  for (Source& source : sources_of(files.train)) by_size[source.size].push_back(std::move(source));
  const char* hint = "hold out text that the model does not learn from";
  const auto checksum = [](Source& source) {
    if (source.checksum.empty()) source.checksum = file_checksum(source.path);
    return source.checksum;
  };
  for (Source& source : sources_of(files.valid)) {
    // Only files of one size can be copies, so hardly any need to be read.
    const auto same_size = by_size.find(source.size);
    if (same_size == by_size.end()) continue;
    for (Source& other : same_size->second) {
      if (source.path == other.path)
        throw Error(fmt::format("{} is both in data.train and in data.valid", source.path.string()), hint);
      if (source.size == 0 || checksum(source) != checksum(other)) continue;
      throw Error(
          fmt::format("{} of data.valid is a copy of {} of data.train", source.path.string(), other.path.string()),
          hint);
    }
  }
}

/// A hash of the texts that a store was made of, in their order; of a bare array, of its description.
std::string texts_checksum(const fs::path& store) {
  if (data::is_longcrawl64(store)) return file_checksum(store / ".zarray");
  const auto attributes = json::parse(read_file(store / ".zattrs"));
  std::string sums;
  for (const auto& source : attributes.at("sources")) sums += source.at("checksum").get<std::string>();
  return bytes_checksum(sums);
}

void check_tokenizer(const data::TokenStore& store, const fs::path& dir, const data::Tokenizer& tokenizer,
                     const DataConfig& config) {
  if (store.tokenizer_fingerprint() == tokenizer.fingerprint()) return;
  throw Error(
      fmt::format("{} holds tokens of another tokenizer than data.tokenizer = \"{}\"", dir.string(), config.tokenizer),
      "set data.tokenizer to the one that it was made with, or run fox tokenize again");
}

std::unique_ptr<const data::TrainingStream> open_longcrawl64(const RunConfig& config, const fs::path& dir,
                                                             const data::Tokenizer& tokenizer) {
  const int64_t context = config.data.context;
  auto stream = std::make_unique<const data::LongCrawl64Stream>(dir, context, config.train.batch_tokens / context,
                                                                tokenizer.end_of_text(), tokenizer.vocab_size());
  const int64_t there = stream->contexts_per_epoch() * context;
  const int64_t wanted = total_steps(config.train) * config.train.batch_tokens;
  if (wanted > there) {
    throw Error(fmt::format("{} holds {} tokens for batches of {}, {} fewer than the {} of train.max_tokens",
                            dir.string(), there, config.train.batch_tokens, wanted - there, wanted),
                fmt::format("LongCrawl64 is read once: set train.max_tokens = {} or less", there));
  }
  stream->check_complete(wanted / context);
  return stream;
}

}  // namespace

CorpusFiles find_corpus_files(const DataConfig& config) {
  if (config.train.empty()) throw Error("data.train names no text", "for example: train = [\"corpus/train\"]");
  CorpusFiles files{find_part(config, config.train, "data.train"), find_part(config, config.valid, "data.valid")};
  if (files.valid.empty() && config.valid_fraction > 0) split_off_last(files, config.valid_fraction);
  check_nothing_shared(files);
  return files;
}

data::Tokenizer make_tokenizer(const DataConfig& config) {
  if (config.tokenizer == "bytes") return data::Tokenizer::gpt2(0);
  if (config.tokenizer == "gpt2-json") return data::Tokenizer::gpt2_json();
  if (config.tokenizer == "gpt2")
    return config.merges ? data::Tokenizer::gpt2(*config.merges) : data::Tokenizer::gpt2();
  if (fs::is_directory(config.tokenizer) || !fs::exists(config.tokenizer)) {
    throw Error(fmt::format("there is no tokenizer '{}'", config.tokenizer),
                "known: gpt2, gpt2-json, bytes, FILE.json (tokenizer.json), FILE.model (SentencePiece's)");
  }
  return data::Tokenizer::load(config.tokenizer);
}

void check_model_tokenizer(const fs::path& dir, const data::Tokenizer& tokenizer) {
  const fs::path file = data::Tokenizer::find_in(infer::locate_model(dir).dir);
  if (file.empty() || data::Tokenizer::load(file).fingerprint() == tokenizer.fingerprint()) return;
  throw Error(fmt::format("the model to start from has another tokenizer ({}) than data.tokenizer", file.string()),
              fmt::format("set data.tokenizer = \"{}\"", file.string()));
}

void fit_vocabulary(ModelConfig& config, const data::Tokenizer& tokenizer) {
  if (config.vocab_size == 0) config.vocab_size = tokenizer.vocab_size();
  if (config.vocab_size >= tokenizer.vocab_size()) return;
  throw Error(fmt::format("model.vocab_size = {} is smaller than the tokenizer's {} ids", config.vocab_size,
                          tokenizer.vocab_size()),
              "leave it out to take the tokenizer's");
}

Corpora open_corpora(const RunConfig& config, const data::Tokenizer& tokenizer, const fs::path& run_dir) {
  const CorpusFiles files = find_corpus_files(config.data);
  const fs::path folder = data::token_folder(config.data, tokenizer, run_dir);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error)
    throw Error(fmt::format("cannot make {}: {}", folder.string(), error.message()), "choose another data.cache");
  Corpora corpora;
  corpora.identity["tokenizer"] = tokenizer.fingerprint();
  const auto note = [&](const char* name, const fs::path& dir, int64_t documents, int64_t tokens) {
    corpora.identity[name] = {{"checksum", texts_checksum(dir)}, {"documents", documents}, {"tokens", tokens}};
  };
  const auto open = [&](const CorpusPart& part, const char* name, int64_t to_read) {
    const fs::path dir = part.store.empty() ? folder / name : part.store;
    const data::BuildOptions options{.threads = config.train.threads};
    auto store = std::make_shared<const data::TokenStore>(
        part.store.empty() ? data::build_token_store(part.files, tokenizer, dir, options)
                           : data::TokenStore::open(dir));
    check_tokenizer(*store, dir, tokenizer, config.data);
    store->check_complete(to_read > 0 ? std::min(to_read, store->num_tokens()) : store->num_tokens());
    note(name, dir, store->num_documents(), store->num_tokens());
    return store;
  };
  if (config.data.format == "longcrawl64") {
    corpora.train = open_longcrawl64(config, files.train.store, tokenizer);
    const auto shape = data::ZarrMeta::read(files.train.store).shape;
    note("train", files.train.store, shape[0], shape[0] * shape[1]);
  } else {
    auto store = open(files.train, "train", 0);
    try {
      corpora.train = std::make_unique<const data::BatchStream>(std::move(store), config.data.context,
                                                                config.train.seed, tokenizer.end_of_text());
    } catch (const Error&) {
      // Too short for a context, so soon made again: a run that could not begin leaves nothing in its folder.
      if (files.train.store.empty() && config.data.cache.empty()) fs::remove_all(folder / "train");
      throw;
    }
  }
  if (!files.valid.empty()) corpora.valid = open(files.valid, "valid", config.eval.max_tokens);
  return corpora;
}

}  // namespace fox::train
