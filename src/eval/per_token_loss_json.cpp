#include <nlohmann/json.hpp>

#include "eval/number.h"
#include "eval/per_token_loss.h"

namespace fox::eval {
namespace {

nlohmann::json bin_json(const PositionBin& bin) {
  return {{"begin", bin.begin},
          {"end", bin.end},
          {"loss", rounded(bin.loss)},
          {"loss_error", rounded(bin.loss_error, 3)},
          {"accuracy", rounded(bin.accuracy)},
          {"first_word_accuracy", rounded(bin.first_word_accuracy)},
          {"first_word_loss", rounded(bin.first_word_loss)},
          {"other_loss", rounded(bin.other_loss)},
          {"difference", rounded(bin.difference)},
          {"difference_error", rounded(bin.difference_error, 3)}};
}

}  // namespace

nlohmann::json to_json(const PerTokenLoss& result) {
  nlohmann::json bins = nlohmann::json::array();
  for (const PositionBin& bin : result.bins) bins.push_back(bin_json(bin));
  return {{"length", result.length},
          {"stride", result.stride},
          {"paired", result.paired},
          {"tokens", result.tokens},
          {"first_word_tokens", result.first_word_tokens},
          {"windows", result.windows},
          {"accuracy", rounded(result.accuracy)},
          {"first_word_accuracy", rounded(result.first_word_accuracy)},
          {"bins", bins},
          {"loss", rounded(result.loss)},
          {"count", result.count},
          {"smoothed", rounded(result.smoothed)},
          {"perplexity", rounded(result.perplexity)}};
}

nlohmann::json to_json(const HeldOutLoss& result) {
  return {{"loss", rounded(result.loss)},
          {"perplexity", rounded(result.perplexity)},
          {"bits_per_byte", rounded(result.bits_per_byte)},
          {"tokens", result.tokens},
          {"bytes", result.bytes}};
}

}  // namespace fox::eval
