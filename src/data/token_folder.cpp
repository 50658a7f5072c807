#include "data/token_folder.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "data/token_store.h"

namespace fox::data {

std::filesystem::path named_store(const std::vector<std::string>& sources) {
  for (const std::string& source : sources) {
    if (!TokenStore::is_store(source)) continue;
    if (sources.size() == 1) return source;
    throw Error(fmt::format("{} holds tokens already, so no other source can stand beside it", source),
                "name one token store, or give all sources to one fox tokenize");
  }
  return {};
}

std::filesystem::path token_folder(const DataConfig& config, const Tokenizer& tokenizer,
                                   const std::filesystem::path& run_dir) {
  if (config.cache.empty()) return run_dir / "tokens";
  const nlohmann::json key{config.train, config.valid, config.valid_fraction, tokenizer.fingerprint()};
  return std::filesystem::path(config.cache) / bytes_checksum(key.dump()).substr(0, 16);
}

}  // namespace fox::data
