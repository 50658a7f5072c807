#include "config/run_config.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "config/key_reader.h"
#include "config/toml_file.h"

namespace fox {

namespace {

using nlohmann::json;

const Range kTokens = Range::between(0, 1e15);
const Range kPositiveTokens = Range::between(1, 1e15);

/// Keys are listed once, in `visit` below; reading and writing follow that list.
struct TableReading {
  KeyReader& reader;

  template <typename T, typename... Rest>
  void operator()(const char* key, T& value, Rest... rest) {
    reader.read(key, value, rest...);
  }
  void choice(const char* key, std::string& value, const std::vector<std::string>& choices) {
    reader.read_choice(key, value, choices);
  }
};

struct TableWriting {
  json& object;

  template <typename T, typename... Rest>
  void operator()(const char* key, const T& value, Rest...) {
    object[key] = value;
  }
  template <typename T, typename... Rest>
  void operator()(const char* key, const std::optional<T>& value, Rest...) {
    object[key] = value ? json(*value) : json(nullptr);
  }
  void choice(const char* key, const std::string& value, const std::vector<std::string>&) { object[key] = value; }
};

template <typename Visitor>
void visit(DataConfig& c, Visitor&& key) {
  key.choice("format", c.format, {"text", "longcrawl64"});
  key("train", c.train);
  key("valid", c.valid);
  key("valid_fraction", c.valid_fraction, Range::between(0, 1));
  key("tokenizer", c.tokenizer);
  key("merges", c.merges, Range::between(0, 50000));
  key("context", c.context, Range::between(1, 1 << 24));
  key("cache", c.cache);
}

template <typename Visitor>
void visit(TrainConfig& c, Visitor&& key) {
  key("seed", c.seed);
  key("batch_tokens", c.batch_tokens, kPositiveTokens);
  key("micro_batch_tokens", c.micro_batch_tokens, kPositiveTokens);
  key("max_tokens", c.max_tokens, kPositiveTokens);
  key("warmup_tokens", c.warmup_tokens, kTokens);
  key("lr", c.lr, Range::at_least(0));
  key("min_lr", c.min_lr, Range::at_least(0));
  key("beta1", c.beta1, Range::between(0, 1));
  key("beta2", c.beta2, Range::between(0, 1));
  key("eps", c.eps, Range::at_least(0));
  key("weight_decay", c.weight_decay, Range::at_least(0));
  key("max_grad_norm", c.max_grad_norm, Range::above(0));
  key.choice("precision", c.precision, {"float32", "bf16", "float64"});
  key.choice("activation_checkpointing", c.activation_checkpointing, {"none", "mlp", "full"});
  key("deterministic", c.deterministic);
  key("threads", c.threads, Range::between(0, 4096));
  key("device", c.device);
  key.choice("cuda_graph", c.cuda_graph, {"auto", "on", "off"});
  key("max_bad_steps", c.max_bad_steps, Range::at_least(1));
  key("shard_optimizer", c.shard_optimizer);
  key("rank_timeout_s", c.rank_timeout_s, Range::between(1, 86400));
  key("sequence_ranks", c.sequence_ranks, Range::between(1, 1 << 20));
}

template <typename Visitor>
void visit(EvalConfig& c, Visitor&& key) {
  key("interval_tokens", c.interval_tokens, kTokens);
  key("max_tokens", c.max_tokens, kPositiveTokens);
  key("sample_prompt", c.sample_prompt);
  key("sample_tokens", c.sample_tokens, kTokens);
}

template <typename Visitor>
void visit(OutputConfig& c, Visitor&& key) {
  key("dir", c.dir);
  key("log_interval_steps", c.log_interval_steps, Range::at_least(1));
  key("checkpoint_interval_tokens", c.checkpoint_interval_tokens, kTokens);
  key("keep_last", c.keep_last, Range::at_least(1));
  key("keep_every_tokens", c.keep_every_tokens, kTokens);
  key("tensorboard", c.tensorboard);
}

/// Reads the tables of one run file.
class Loader {
 public:
  Loader(std::filesystem::path path, TomlFile file)
      : path_(std::move(path)), file_(std::move(file)), root_(file_.root, path_.string()) {
    root_.set_locator([this](const std::string& key) { return place(key); });
  }

  RunConfig load() {
    // A table that is misspelt is told before what is missing without it.
    root_.accept({"model", "data", "train", "eval", "output"});
    root_.finish();
    RunConfig config;
    config.model = read_model();
    read_data(config.data);
    read_train(config.train, config.data);
    KeyReader eval = root_.table("eval");
    visit(config.eval, TableReading{eval});
    eval.finish();
    KeyReader output = root_.table("output");
    visit(config.output, TableReading{output});
    output.finish();
    if (config.output.dir.empty()) output.fail("dir", "is missing", "for example: dir = \"runs/first\"");
    return config;
  }

 private:
  std::string place(const std::string& key) const {
    const auto it = file_.places.find(key);
    return it == file_.places.end() ? path_.string() : it->second;
  }

  ModelConfig read_model() {
    KeyReader table = root_.table("model");
    std::string base_name;
    table.read("config", base_name);
    json keys = file_.root.value("model", json::object()), base = json::object();
    keys.erase("config");
    std::filesystem::path base_file;
    if (!base_name.empty()) {
      base_file = path_.parent_path() / base_name;
      base = json::parse(read_file(base_file), nullptr, false);
      if (!base.is_object())
        throw Error(fmt::format("{} is no JSON object", base_file.string()), "name a model's config.json");
    }
    const auto locate = [&](const std::string& key) {
      return !keys.contains(key) && base.contains(key) ? base_file.string() : place("model." + key) + ": [model]";
    };
    base.update(keys);
    ModelConfig model = ModelConfig::from_json(base, path_.string() + ": [model]", locate);
    if (!base.contains("vocab_size")) model.vocab_size = 0;
    return model;
  }

  void read_data(DataConfig& data) {
    KeyReader table = root_.table("data");
    visit(data, TableReading{table});
    table.finish();
    if (data.train.empty()) table.fail("train", "names no text", "for example: train = [\"corpus/train\"]");
    if (data.valid_fraction >= 1) table.fail("valid_fraction", "must be below 1", "nothing would be left to train on");
    if (data.format == "longcrawl64") check_longcrawl64(table, data);
    if (data.merges && data.tokenizer != "gpt2") {
      table.fail("merges", fmt::format("cannot be chosen for the tokenizer \"{}\"", data.tokenizer),
                 "only \"gpt2\" has merges to choose from");
    }
  }

  static void check_longcrawl64(const KeyReader& table, const DataConfig& data) {
    if (data.train.size() != 1) {
      table.fail("train", fmt::format("names {} arrays", data.train.size()),
                 "with data.format = \"longcrawl64\" it is one: [\"train.zarr\"]");
    }
    if (data.valid.size() > 1) {
      table.fail("valid", fmt::format("names {} arrays", data.valid.size()), "it is one: [\"heldout.zarr\"]");
    }
    if (data.valid_fraction > 0)
      table.fail("valid_fraction", "splits text files only", "set data.valid = [\"heldout.zarr\"]");
    if (data.tokenizer != "gpt2-json") {
      table.fail("tokenizer", fmt::format("= \"{}\" is not LongCrawl64's", data.tokenizer),
                 "set data.tokenizer = \"gpt2-json\"");
    }
  }

  void read_train(TrainConfig& train, const DataConfig& data) {
    KeyReader table = root_.table("train");
    visit(train, TableReading{table});
    table.finish();
    if (train.max_tokens == 0) table.fail("max_tokens", "is missing", "the number of tokens to train on");
    if (train.batch_tokens == 0) train.batch_tokens = data.context;
    if (train.micro_batch_tokens == 0) train.micro_batch_tokens = train.batch_tokens;
    const auto multiple = [&](const char* key, int64_t value, const char* of, int64_t unit) {
      if (value % unit == 0) return;
      table.fail(key, fmt::format("= {} is no multiple of {} = {}", value, of, unit),
                 value < unit
                     ? fmt::format("the smallest is {}", unit)
                     : fmt::format("the nearest are {} and {}", value / unit * unit, (value / unit + 1) * unit));
    };
    multiple("batch_tokens", train.batch_tokens, "data.context", data.context);
    multiple("micro_batch_tokens", train.micro_batch_tokens, "data.context", data.context);
    if (train.batch_tokens % train.micro_batch_tokens != 0) {
      table.fail(
          "micro_batch_tokens",
          fmt::format("= {} does not divide train.batch_tokens = {}", train.micro_batch_tokens, train.batch_tokens),
          "a step is a whole number of forward passes");
    }
    if (train.sequence_ranks > 1 && data.context % (2 * train.sequence_ranks) != 0) {
      table.fail(
          "sequence_ranks",
          fmt::format("= {} cannot hold contexts of data.context = {} tokens together", train.sequence_ranks,
                      data.context),
          fmt::format("each takes two equal chunks: data.context must be a multiple of {}", 2 * train.sequence_ranks));
    }
    if (train.warmup_tokens > train.max_tokens) {
      table.fail("warmup_tokens",
                 fmt::format("= {} is above train.max_tokens = {}", train.warmup_tokens, train.max_tokens),
                 "the warm-up is a part of the training");
    }
    if (train.min_lr > train.lr)
      table.fail("min_lr", fmt::format("= {} is above train.lr = {}", train.min_lr, train.lr),
                 "the learning rate falls to min_lr");
    if (train.beta1 >= 1) table.fail("beta1", "must be below 1", "usual is 0.9");
    if (train.beta2 >= 1) table.fail("beta2", "must be below 1", "usual is 0.95");
  }

  std::filesystem::path path_;
  TomlFile file_;
  KeyReader root_;
};

}  // namespace

RunConfig RunConfig::load(const std::filesystem::path& toml, const std::vector<std::string>& overrides) {
  TomlFile file = TomlFile::read(toml);
  for (const std::string& assignment : overrides) file.set(assignment);
  try {
    return Loader(toml, std::move(file)).load();
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    throw UsageError(error.what(), error.hint());
  }
}

json RunConfig::to_json() const {
  RunConfig copy = *this;
  json root = {{"model", model.to_json()}};
  if (model.vocab_size == 0) root["model"].erase("vocab_size");
  visit(copy.data, TableWriting{root["data"]});
  visit(copy.train, TableWriting{root["train"]});
  visit(copy.eval, TableWriting{root["eval"]});
  visit(copy.output, TableWriting{root["output"]});
  return root;
}

std::string RunConfig::to_toml() const {
  const json root = to_json();
  nlohmann::ordered_json ordered;
  for (const char* table : {"model", "data", "train", "eval", "output"}) ordered[table] = root[table];
  // What only transformers wants to know of a config.json.
  ordered["model"].erase("architectures");
  ordered["model"].erase("use_cache");
  return "# A run of fox train: every setting.\n\n" + fox::to_toml(ordered);
}

}  // namespace fox
