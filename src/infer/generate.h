#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"
#include "infer/sampling.h"
#include "model/language_model.h"

namespace fox::infer {

struct GenerateOptions {
  SamplingOptions sampling;
  int64_t max_tokens = 256;       ///< new tokens at most
  std::vector<std::string> stop;  ///< generation ends before the first of these
  bool stop_at_end_of_text = true;
};

/// Throws fox::Error when an option is out of range.
void check_options(const GenerateOptions& options);

enum class FinishReason { kLength, kStopString, kEndOfText, kCancelled };
/// "length", "stop string", "end of text", "cancelled".
std::string finish_name(FinishReason reason);

struct Generation {
  std::string text;          ///< valid UTF-8, without the prompt and without a stop string
  std::vector<int32_t> ids;  ///< the tokens drawn, those of a stop string included
  FinishReason reason = FinishReason::kLength;
  int64_t prompt_tokens = 0;  ///< with the <|endoftext|> that leads every document
  double prompt_seconds = 0;
  double seconds = 0;  ///< without the prompt
};

/// Called with each piece of text as soon as it is settled; false ends the generation (kCancelled).
using OnText = std::function<bool(std::string_view)>;

/// Continues `prompt`, read as the beginning of a document. The same options and model give the same text. Ends within
/// a token when interrupted() (base/interrupt.h) turns true, with reason kCancelled.
Generation generate(model::LanguageModel& model, const data::Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options, const OnText& on_text = {});

}  // namespace fox::infer
