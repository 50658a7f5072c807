#include "data/token_folder.h"

#include <nlohmann/json.hpp>

#include "base/files.h"

namespace fox::data {

std::filesystem::path token_folder(const DataConfig& config, const Tokenizer& tokenizer,
                                   const std::filesystem::path& run_dir) {
  if (config.cache.empty()) return run_dir / "tokens";
  const nlohmann::json key{config.train, config.valid, config.valid_fraction, tokenizer.fingerprint()};
  return std::filesystem::path(config.cache) / bytes_checksum(key.dump()).substr(0, 16);
}

}  // namespace fox::data
