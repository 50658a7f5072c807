#include "infer/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/interrupt.h"
#include "infer/session.h"
#include "infer/text_stream.h"

namespace fox::infer {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::string finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kLength:
      return "length";
    case FinishReason::kStopString:
      return "stop string";
    case FinishReason::kEndOfText:
      return "end of text";
    case FinishReason::kCancelled:
      break;
  }
  return "cancelled";
}

void check_options(const GenerateOptions& options) {
  if (options.max_tokens < 0) throw Error("max_tokens is below 0", "give the number of new tokens, 0 or more");
  options.sampling.validate();
}

Generation generate(model::LanguageModel& model, const data::Tokenizer& tokenizer, std::string_view prompt,
                    const GenerateOptions& options, const OnText& on_text) {
  check_options(options);
  Sampler sampler(options.sampling);
  TextStream stream(options.stop);
  std::vector<int32_t> prompt_ids = {tokenizer.end_of_text()};
  const std::vector<int32_t> encoded = tokenizer.encode(prompt);
  prompt_ids.insert(prompt_ids.end(), encoded.begin(), encoded.end());

  Generation result;
  result.prompt_tokens = static_cast<int64_t>(prompt_ids.size());
  bool wanted = true;
  const auto emit = [&](const std::string& text) {
    result.text += text;
    if (!text.empty() && on_text && !on_text(text)) wanted = false;
  };

  const auto decoder = tokenizer.decoder(/*continues=*/!encoded.empty());
  auto start = std::chrono::steady_clock::now();
  Session session(model);
  at::Tensor logits_V = session.prefill(prompt_ids);
  result.prompt_seconds = seconds_since(start);
  start = std::chrono::steady_clock::now();
  while (static_cast<int64_t>(result.ids.size()) < options.max_tokens) {
    if (!wanted || interrupted()) {
      result.reason = FinishReason::kCancelled;
      break;
    }
    if (!result.ids.empty()) logits_V = session.step(result.ids.back());
    // A vocabulary may be padded beyond the tokenizer's; the padding stands for no text.
    const int32_t id = sampler.draw(logits_V.narrow(0, 0, std::min(tokenizer.vocab_size(), logits_V.size(0))));
    if (options.stop_at_end_of_text && id == tokenizer.end_of_text()) {
      result.reason = FinishReason::kEndOfText;
      break;
    }
    result.ids.push_back(id);
    emit(stream.push(decoder->push(id)));
    if (stream.stopped()) break;
  }
  if (wanted) emit(stream.push(decoder->finish()));
  if (wanted) emit(stream.finish());
  if (stream.stopped()) result.reason = FinishReason::kStopString;
  result.seconds = seconds_since(start);
  return result;
}

}  // namespace fox::infer
