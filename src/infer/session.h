#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "model/language_model.h"

namespace fox::infer {

/// One sequence that grows: a model and what it remembers of the tokens so far.
class Session {
 public:
  /// The model must outlive the session. Prompts are read in pieces of `prefill_chunk` tokens, which bounds memory.
  explicit Session(model::LanguageModel& model, int64_t prefill_chunk = 1024);

  /// Reads `ids` (at least one) and returns the logits (V,), float32 on the CPU, of what follows the last of them.
  /// Throws fox::Error naming an id outside the vocabulary.
  at::Tensor prefill(std::span<const int32_t> ids);
  /// The same for one token.
  at::Tensor step(int32_t id);

  /// Tokens read so far.
  int64_t length() const { return cache_.length; }

 private:
  model::LanguageModel& model_;
  model::Cache cache_;
  int64_t prefill_chunk_;
};

}  // namespace fox::infer
