#include "eval/per_token_loss.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/progress.h"
#include "eval/window_scores.h"

namespace fox::eval {
namespace {

constexpr int64_t kSmoothing = 101;  // of the paper's plots
constexpr int64_t kFirstBin = 32;

/// The windows to read, and which of their tokens count.
struct Plan {
  bool paired = false;
  std::vector<Window> windows;
  /// Of each paired window: the first token that counts (its last always does), and that token's unit.
  struct Counted {
    int64_t first_token = 0, first_unit = 0;
  };
  std::vector<Counted> counted;
  int64_t units = 0;
};

void check_enough(const data::TokenStore& store, int64_t needed) {
  if (store.num_tokens() >= needed) return;
  throw Error(fmt::format("the held-out text has {} tokens, {} fewer than one window of {}", store.num_tokens(),
                          needed - store.num_tokens(), needed),
              "give more text with --data, or shorter windows with --length");
}

/// Windows side by side or with gaps: each is a unit of its own, and all its tokens count.
Plan plan_unpaired(const data::TokenStore& store, const PerTokenLossOptions& options) {
  int64_t count = (store.num_tokens() - options.length) / options.stride + 1;
  if (options.max_tokens > 0) count = std::clamp<int64_t>(options.max_tokens / options.length, 1, count);
  Plan plan;
  for (int64_t i = 0; i < count; ++i) plan.windows.push_back({i * options.stride, options.length});
  plan.units = count;
  return plan;
}

/// Overlapping windows: token t is seen at the positions congruent to t modulo the stride, in all of [0, length) if
/// windows start that early. Tokens that count come in a few long runs over the whole store, because each run costs a
/// window length of others before it.
Plan plan_paired(const data::TokenStore& store, const PerTokenLossOptions& options) {
  const int64_t stride = options.stride;
  const int64_t lead = options.length - stride;  // the first token that a window sees at its last positions
  const int64_t available = (store.num_tokens() - lead) / stride * stride;
  int64_t wanted = available;
  if (options.max_tokens > 0) wanted = std::clamp(options.max_tokens / stride * stride, stride, available);
  const int64_t runs = wanted == available ? 1 : std::max<int64_t>(1, wanted / (4 * options.length));
  const int64_t run_length = wanted / runs / stride * stride;
  Plan plan;
  plan.paired = true;
  for (int64_t r = 0; r < runs; ++r) {
    const int64_t offset = runs == 1 ? 0 : (available - run_length) * r / (runs - 1) / stride * stride;
    const int64_t first = lead + offset;
    for (int64_t start = first - lead; start < first + run_length; start += stride) {
      plan.windows.push_back({start, std::min(options.length, first + run_length - start)});
      plan.counted.push_back({first, plan.units});
    }
    plan.units += run_length;
  }
  return plan;
}

/// Sums by position, by bin, and by unit and bin.
struct Tally {
  std::vector<int64_t> bounds;
  std::vector<int64_t> bin_of;  // position → bin
  std::vector<double> loss;
  std::vector<int64_t> count;
  std::vector<double> unit_loss;  // units × bins
  struct Bin {
    int64_t tokens = 0, correct = 0, first_word = 0, first_word_correct = 0;
    double loss = 0, first_word_loss = 0;
  };
  std::vector<Bin> bins;

  Tally(int64_t length, int64_t units, std::vector<int64_t> boundaries)
      : bounds(std::move(boundaries)), loss(length), count(length), bins(bounds.size() - 1) {
    for (size_t b = 0; b < bins.size(); ++b) bin_of.insert(bin_of.end(), bounds[b + 1] - bounds[b], b);
    unit_loss.resize(units * bins.size());
  }

  void add(int64_t position, int64_t unit, double nats, bool correct, bool first_word) {
    loss[position] += nats;
    ++count[position];
    const int64_t b = bin_of[position];
    unit_loss[unit * bins.size() + b] += nats;
    Bin& bin = bins[b];
    ++bin.tokens;
    bin.loss += nats;
    bin.correct += correct;
    if (!first_word) return;
    ++bin.first_word;
    bin.first_word_correct += correct;
    bin.first_word_loss += nats;
  }
};

/// Which tokens of `scores` start lines with their first word. A label may begin before the window, so some earlier
/// tokens are read to find the line's start.
std::vector<uint8_t> first_words_of(const data::TokenStore& store, const data::Tokenizer& tokenizer, int64_t first,
                                    size_t count) {
  constexpr int64_t kLookBack = 256;
  const int64_t begin = std::max<int64_t>(0, first - kLookBack);
  std::vector<int32_t> ids(first - begin + count);
  store.read(begin, ids);
  std::vector<uint8_t> mask = first_word_tokens(ids, tokenizer, begin == 0);
  mask.erase(mask.begin(), mask.begin() + (first - begin));
  return mask;
}

/// Adds the scores of one chunk of one window.
void add_scores(const Plan& plan, const WindowScores& scores, const std::vector<uint8_t>& first_word, Tally& tally) {
  const int64_t first_token = plan.windows[scores.window].first + scores.position;
  for (size_t i = 0; i < scores.loss.size(); ++i) {
    const int64_t token = first_token + static_cast<int64_t>(i);
    auto unit = static_cast<int64_t>(scores.window);
    if (plan.paired) {
      const Plan::Counted& counted = plan.counted[scores.window];
      if (token < counted.first_token) continue;
      unit = counted.first_unit + token - counted.first_token;
    }
    tally.add(scores.position + static_cast<int64_t>(i), unit, scores.loss[i], scores.correct[i] != 0,
              !first_word.empty() && first_word[i] != 0);
  }
}

struct MeanAndError {
  double mean = 0;
  std::optional<double> error;  // one value does not tell
};

template <typename F>
MeanAndError mean_and_error(int64_t n, F value) {
  double mean = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) mean += value(i) / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) squares += (value(i) - mean) * (value(i) - mean);
  if (n < 2) return {mean, std::nullopt};
  return {mean, std::sqrt(squares / static_cast<double>(n - 1) / static_cast<double>(n))};
}

std::vector<PositionBin> summarise_bins(const Tally& tally, int64_t units, const PerTokenLossOptions& options) {
  const size_t n = tally.bins.size();
  const auto unit_mean = [&](int64_t unit, size_t b) {
    return tally.unit_loss[unit * n + b] * static_cast<double>(units) / static_cast<double>(tally.bins[b].tokens);
  };
  const auto reference = std::find(tally.bounds.begin() + 1, tally.bounds.end(), options.train_context.value_or(-1));
  std::vector<PositionBin> bins;
  for (size_t b = 0; b < n; ++b) {
    const Tally::Bin& sums = tally.bins[b];
    PositionBin bin;
    bin.begin = tally.bounds[b];
    bin.end = tally.bounds[b + 1];
    bin.loss = sums.loss / static_cast<double>(sums.tokens);
    bin.loss_error = mean_and_error(units, [&](int64_t u) { return unit_mean(u, b); }).error;
    bin.accuracy = static_cast<double>(sums.correct) / static_cast<double>(sums.tokens);
    if (options.first_word && sums.first_word > 0) {
      const auto first_word = static_cast<double>(sums.first_word);
      bin.first_word_accuracy = static_cast<double>(sums.first_word_correct) / first_word;
      bin.first_word_loss = sums.first_word_loss / first_word;
    }
    if (options.first_word && sums.first_word < sums.tokens) {
      bin.other_loss = (sums.loss - sums.first_word_loss) / static_cast<double>(sums.tokens - sums.first_word);
    }
    if (reference != tally.bounds.end()) {
      const size_t r = reference - tally.bounds.begin() - 1;
      const MeanAndError d = mean_and_error(units, [&](int64_t u) { return unit_mean(u, b) - unit_mean(u, r); });
      bin.difference = d.mean;
      bin.difference_error = d.error;
    }
    bins.push_back(bin);
  }
  return bins;
}

void summarise(const Tally& tally, const PerTokenLossOptions& options, PerTokenLoss& result) {
  double sum = 0;
  for (size_t i = 0; i < tally.loss.size(); ++i) {
    result.loss.push_back(tally.loss[i] / static_cast<double>(tally.count[i]));
    sum += result.loss.back();
    result.perplexity.push_back(std::exp(sum / static_cast<double>(i + 1)));
  }
  result.count = tally.count;
  result.smoothed = moving_average(result.loss, kSmoothing);
  result.bins = summarise_bins(tally, result.units, options);
  Tally::Bin all;
  for (const Tally::Bin& bin : tally.bins) {
    all.tokens += bin.tokens;
    all.correct += bin.correct;
    all.first_word += bin.first_word;
    all.first_word_correct += bin.first_word_correct;
  }
  const int64_t seen = result.paired ? options.length / options.stride : 1;  // times that each token was predicted
  result.tokens = all.tokens / seen;
  result.first_word_tokens = all.first_word / seen;
  result.accuracy = static_cast<double>(all.correct) / static_cast<double>(all.tokens);
  if (all.first_word > 0) {
    result.first_word_accuracy = static_cast<double>(all.first_word_correct) / static_cast<double>(all.first_word);
  }
}

}  // namespace

void check_options(const PerTokenLossOptions& options) {
  if (options.length < 1) throw Error("the window length must be at least 1 token", "set it with --length");
  if (options.stride < 1) throw Error("the stride must be at least 1 token", "set it with --stride");
  if (options.max_tokens < 0) throw Error("the number of held-out tokens is below 0", "0 reads all of them");
  if (options.stride < options.length && options.length % options.stride != 0) {
    throw Error(fmt::format("windows of {} tokens cannot start every {} tokens", options.length, options.stride),
                "the stride must divide the length, so that each token is seen equally often in every position bin");
  }
}

HeldOutLoss held_out_loss(model::LanguageModel& model, const data::TokenStore& store, const data::Tokenizer& tokenizer,
                          int64_t context, int64_t max_tokens) {
  const int64_t total = max_tokens > 0 ? std::min(max_tokens, store.num_tokens()) : store.num_tokens();
  if (total == 0) throw Error("the held-out text is empty", "name text that holds something under [data] valid");
  std::vector<Window> windows;
  for (int64_t first = 0; first < total; first += context) windows.push_back({first, std::min(context, total - first)});
  HeldOutLoss result;
  double sum = 0;
  score_windows(model, store, tokenizer.end_of_text(), windows, [&](const WindowScores& scores) {
    sum += std::accumulate(scores.loss.begin(), scores.loss.end(), 0.0);
    result.tokens += static_cast<int64_t>(scores.loss.size());
    result.bytes += std::ssize(tokenizer.decode(scores.ids, /*continues=*/true));
  });
  result.loss = sum / static_cast<double>(result.tokens);
  result.perplexity = std::exp(result.loss);
  result.bits_per_byte = sum / static_cast<double>(std::max<int64_t>(1, result.bytes)) / std::log(2.0);
  return result;
}

PerTokenLoss per_token_loss(model::LanguageModel& model, const data::TokenStore& store,
                            const data::Tokenizer& tokenizer, const PerTokenLossOptions& options) {
  check_options(options);
  check_enough(store, options.length);
  const bool paired = options.stride < options.length;
  const Plan plan = paired ? plan_paired(store, options) : plan_unpaired(store, options);
  Tally tally(options.length, plan.units,
              position_bins(options.length, paired ? options.stride : kFirstBin, options.train_context));
  int64_t total = 0, done = 0;
  for (const Window& window : plan.windows) total += window.length;
  std::optional<Progress> progress;
  if (options.progress) progress.emplace("per-token loss", total, "tokens");
  score_windows(model, store, tokenizer.end_of_text(), plan.windows, [&](const WindowScores& scores) {
    std::vector<uint8_t> first_word;
    if (options.first_word) {
      first_word =
          first_words_of(store, tokenizer, plan.windows[scores.window].first + scores.position, scores.loss.size());
    }
    add_scores(plan, scores, first_word, tally);
    done += static_cast<int64_t>(scores.loss.size());
    if (progress) progress->update(done);
  });
  if (progress) progress->finish();

  PerTokenLoss result;
  result.length = options.length;
  result.stride = options.stride;
  result.paired = paired;
  result.windows = static_cast<int64_t>(plan.windows.size());
  result.units = plan.units;
  summarise(tally, options, result);
  return result;
}

std::vector<uint8_t> first_word_tokens(std::span<const int32_t> ids, const data::Tokenizer& tokenizer,
                                       bool starts_line) {
  std::vector<uint8_t> mask(ids.size());
  bool in_first_word = starts_line;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == tokenizer.end_of_text()) {
      in_first_word = true;
      continue;
    }
    const std::string_view bytes = tokenizer.bytes_of(ids[i]);
    const size_t line_break = bytes.rfind('\n');
    if (line_break != std::string_view::npos) {
      // The line break belongs to the line before; what follows it in the same token begins the next one.
      in_first_word = line_break + 1 == bytes.size() || bytes[line_break + 1] != ' ';
      continue;
    }
    if (bytes.starts_with(' ')) in_first_word = false;
    mask[i] = in_first_word;
  }
  return mask;
}

std::vector<int64_t> position_bins(int64_t length, int64_t first_width, std::optional<int64_t> train_context) {
  constexpr int64_t kMostBeyond = 8;
  const int64_t context = train_context.value_or(0);
  const bool marked = context > 0 && context < length && context % first_width == 0;
  const bool even_beyond = marked && length - context <= kMostBeyond * context;
  std::vector<int64_t> bounds = {0};
  int64_t next = first_width;
  while (bounds.back() < length) {
    const int64_t last = bounds.back();
    if (even_beyond && last >= context) {
      next = last + context;
    } else if (marked && last < context && next > context) {
      next = context;
    }
    bounds.push_back(std::min(next, length));
    next = 2 * bounds.back();
  }
  return bounds;
}

std::vector<double> moving_average(std::span<const double> values, int64_t window) {
  const auto n = static_cast<int64_t>(values.size());
  const int64_t half = window / 2;
  std::vector<double> sums(n + 1);
  for (int64_t i = 0; i < n; ++i) sums[i + 1] = sums[i] + values[i];
  std::vector<double> out(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = std::max<int64_t>(0, i - half), end = std::min(n, i + half + 1);
    out[i] = (sums[end] - sums[first]) / static_cast<double>(end - first);
  }
  return out;
}

}  // namespace fox::eval
