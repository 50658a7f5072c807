#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/token_store.h"
#include "infer/load_model.h"

namespace fox::eval {

/// Text that a model did not see in training, as tokens of its tokenizer.
class HeldOutText {
 public:
  /// `sources`: text files and folders, or one token store or array of LongCrawl64; none: the held-out text of the
  /// model's run (tokens/valid of its run directory, or where [data] cache points). Throws fox::Error when there is
  /// none, or when a store was made with another tokenizer.
  HeldOutText(const infer::LoadedModel& loaded, const std::vector<std::filesystem::path>& sources);
  /// Throws what the constructor would throw, before the model is loaded and any text is read.
  static void check(const infer::ModelLocation& location, const data::Tokenizer& tokenizer,
                    const std::vector<std::filesystem::path>& sources);
  ~HeldOutText();
  HeldOutText(const HeldOutText&) = delete;
  HeldOutText& operator=(const HeldOutText&) = delete;

  const data::TokenStore& store() const { return *store_; }
  /// What it was read from, for people.
  const std::vector<std::string>& sources() const { return sources_; }
  /// A short hash of the beginning (up to a million tokens) and the length.
  std::string fingerprint() const;

 private:
  std::unique_ptr<data::TokenStore> store_;
  std::vector<std::string> sources_;
  std::filesystem::path temporary_;  // holds a store that was made for this object alone
};

}  // namespace fox::eval
