#include "eval/held_out_text.h"

#include <fmt/format.h>
#include <stdlib.h>

#include <algorithm>

#include "base/error.h"
#include "base/files.h"
#include "data/token_folder.h"

namespace fox::eval {
namespace {

namespace fs = std::filesystem;

fs::path make_temporary_folder() {
  std::string name = (fs::temp_directory_path() / "fox-tokens-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) {
    throw Error(fmt::format("cannot make a folder in {}", fs::temp_directory_path().string()),
                "set TMPDIR to a folder that can be written");
  }
  return name;
}

/// Where `fox train` keeps the tokens of the run's held-out text.
fs::path store_of_run(const infer::ModelLocation& location, const data::Tokenizer& tokenizer) {
  if (!location.run_dir) {
    throw Error(fmt::format("{} belongs to no run, so there is no held-out text to read", location.dir.string()),
                "name the text with --data");
  }
  const nlohmann::json run = location.run_json();
  const nlohmann::json data = run.value("/config/data"_json_pointer, nlohmann::json::object());
  DataConfig config;
  config.train = data.value("train", config.train);
  config.valid = data.value("valid", config.valid);
  config.valid_fraction = data.value("valid_fraction", config.valid_fraction);
  config.cache = data.value("cache", config.cache);
  const fs::path named = data::named_store(config.valid);
  fs::path dir = named.empty() ? data::token_folder(config, tokenizer, *location.run_dir) / "valid" : named;
  if (!data::TokenStore::is_store(dir)) {
    throw Error(fmt::format("the run {} has no held-out text: {} is missing", location.run_dir->string(), dir.string()),
                "set [data] valid or valid_fraction in the run file, or name the text with --data");
  }
  return dir;
}

/// The store to read, or "" when `sources` are text.
fs::path find_store(const infer::ModelLocation& location, const data::Tokenizer& tokenizer,
                    const std::vector<fs::path>& sources) {
  fs::path dir;
  if (sources.empty()) dir = store_of_run(location, tokenizer);
  if (sources.size() == 1 && data::TokenStore::is_store(sources[0])) dir = sources[0];
  if (!dir.empty() && data::TokenStore::open(dir).tokenizer_fingerprint() != tokenizer.fingerprint()) {
    throw Error(fmt::format("{} was made with another tokenizer than the model's", dir.string()),
                "name the text itself with --data");
  }
  for (const fs::path& source : sources) {
    if (fs::exists(source)) continue;
    throw Error(fmt::format("there is no {}", source.string()), "--data takes text files and folders");
  }
  return dir;
}

}  // namespace

void HeldOutText::check(const infer::ModelLocation& location, const data::Tokenizer& tokenizer,
                        const std::vector<fs::path>& sources) {
  find_store(location, tokenizer, sources);
}

HeldOutText::HeldOutText(const infer::LoadedModel& loaded, const std::vector<fs::path>& sources) {
  const data::Tokenizer& tokenizer = loaded.tokenizer;
  if (const fs::path dir = find_store(loaded.location, tokenizer, sources); !dir.empty()) {
    store_ = std::make_unique<data::TokenStore>(data::TokenStore::open(dir));
    sources_ = {dir.string()};
    return;
  }
  for (const fs::path& source : sources) sources_.push_back(source.string());
  temporary_ = make_temporary_folder();
  try {
    store_ = std::make_unique<data::TokenStore>(data::build_token_store(sources, tokenizer, temporary_ / "tokens"));
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary_, ignored);
    throw;
  }
}

HeldOutText::~HeldOutText() {
  store_.reset();
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
}

std::string HeldOutText::fingerprint() const {
  std::vector<int32_t> ids(std::min<int64_t>(store_->num_tokens(), 1 << 20));
  store_->read(0, ids);
  const std::string_view bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t));
  return fmt::format("{}-{}", bytes_checksum(bytes).substr(0, 16), store_->num_tokens());
}

}  // namespace fox::eval
