#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

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

// A line that is drawn has no use for more points, and a page of several long contexts would be slow with them.
constexpr int64_t kCurvePoints = 4096;

std::vector<double> every_nth(const std::vector<double>& values, int64_t n) {
  std::vector<double> kept;
  for (size_t i = 0; i < values.size(); i += n) kept.push_back(values[i]);
  return kept;
}

}  // namespace

nlohmann::json to_json(const PerTokenLoss& result) {
  const int64_t every = std::max<int64_t>(1, (result.length + kCurvePoints - 1) / kCurvePoints);
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
          {"smoothed", rounded(every_nth(result.smoothed, every))},
          {"smoothed_every", every},
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
