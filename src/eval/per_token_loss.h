#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/token_store.h"
#include "data/tokenizer.h"
#include "model/language_model.h"

namespace fox::eval {

/// Loss over windows of `context` tokens that do not overlap.
struct HeldOutLoss {
  double loss = 0;        ///< nats a token
  double perplexity = 0;  ///< exp(loss)
  double bits_per_byte = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;
};

/// Reads the first `max_tokens` tokens of the store (0: all; the last window may be shorter). Input 0 of each window is
/// <|endoftext|>, as in training, so that every token is predicted. Throws fox::Error for an empty store.
HeldOutLoss held_out_loss(model::LanguageModel& model, const data::TokenStore& store, const data::Tokenizer& tokenizer,
                          int64_t context, int64_t max_tokens);

struct PerTokenLossOptions {
  int64_t length = 0;  ///< tokens a window
  /// A window starts every `stride` tokens. When stride < length (which it must then divide), positions are *paired*:
  /// only tokens that are seen in every position bin count, so that each bin averages the same tokens.
  int64_t stride = 0;
  /// Held-out tokens that count, at most (0: all). Paired: some runs of tokens, spread evenly over the store. Else: the
  /// first windows.
  int64_t max_tokens = 0;
  bool first_word = false;  ///< also tell tokens of the first word of a line (first_word_tokens) from all others
  std::optional<int64_t> train_context = {};  ///< bins are compared with the one that ends here
  bool progress = true;                       ///< progress bar on standard error
};

/// Throws fox::Error when the options are out of range or do not fit together.
void check_options(const PerTokenLossOptions& options);

/// Positions [begin, end) of a window.
struct PositionBin {
  int64_t begin = 0, end = 0;
  double loss = 0;                   ///< nats a token
  std::optional<double> loss_error;  ///< standard error of `loss` over units (PerTokenLoss::units); of one: nothing
  double accuracy = 0;               ///< share of tokens that have the largest logit
  std::optional<double> first_word_accuracy;
  std::optional<double> first_word_loss;   ///< nats a token, of tokens of first words
  std::optional<double> other_loss;        ///< and of all others
  std::optional<double> difference;        ///< loss minus that of the bin that ends at the training length
  std::optional<double> difference_error;  ///< its standard error: differences are taken unit by unit
};

/// arXiv 2503.02130, section 4.2: L(i) = mean over windows of -ln p(token i | earlier tokens of the window).
struct PerTokenLoss {
  int64_t length = 0, stride = 0;
  bool paired = false;
  int64_t tokens = 0;             ///< different tokens that were predicted and counted
  int64_t first_word_tokens = 0;  ///< of these, tokens of first words
  int64_t windows = 0;
  int64_t units = 0;               ///< what standard errors are taken over: tokens when paired, else windows
  std::vector<double> loss;        ///< L(i), nats; position 0 first
  std::vector<int64_t> count;      ///< tokens that L(i) averages
  std::vector<double> smoothed;    ///< centred moving average of L(i) over 101 positions, shortened at both ends
  std::vector<double> perplexity;  ///< P(l) = exp(mean of L(i) over i < l), entry l - 1
  std::vector<PositionBin> bins;   ///< position_bins()
  double accuracy = 0;
  std::optional<double> first_word_accuracy;
};

/// Streams through the model's cache in chunks, so that memory does not grow with logits of length × vocabulary.
/// Throws fox::Error when the options do not fit together or the store is shorter than what they need, by how much.
PerTokenLoss per_token_loss(model::LanguageModel& model, const data::TokenStore& store,
                            const data::Tokenizer& tokenizer, const PerTokenLossOptions& options);

/// 1 for each token between a line start and the first token that begins with a space, else 0. In a text whose lines
/// start with labels, such as the verses of a Bible, these are the labels. `starts_line`: ids[0] starts a line;
/// otherwise nothing counts before the first line break.
std::vector<uint8_t> first_word_tokens(std::span<const int32_t> ids, const data::Tokenizer& tokenizer,
                                       bool starts_line = true);

/// Boundaries of position bins: 0, w, 2w, 4w, … to `length`, where w is the stride of paired windows, else 32. From the
/// training length on (which is a boundary if w divides it) bins are one training length wide, if that makes at most 8.
std::vector<int64_t> position_bins(int64_t length, int64_t first_width, std::optional<int64_t> train_context);

/// Centred moving average of `window` (odd) values, shortened at both ends.
std::vector<double> moving_average(std::span<const double> values, int64_t window);

/// As docs/formats.md describes eval/loss.json, without the fields that say where it came from.
nlohmann::json to_json(const PerTokenLoss& result);
nlohmann::json to_json(const HeldOutLoss& result);

}  // namespace fox::eval
