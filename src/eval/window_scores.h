#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "data/token_store.h"
#include "model/language_model.h"

namespace fox::eval {

/// Tokens [first, first + length) of a store, read as one sequence of its own.
struct Window {
  int64_t first = 0, length = 0;
};

/// What the model gave to consecutive tokens of one window.
struct WindowScores {
  size_t window = 0;                 ///< index into the windows that were asked for
  int64_t position = 0;              ///< of the first token here
  std::span<const int32_t> ids;      ///< the tokens that were predicted
  std::span<const double> loss;      ///< -ln p, nats
  std::span<const uint8_t> correct;  ///< 1 where the token has the largest logit
};

/// Scores every token of every window. Input 0 of a window is `start_id`, so that all its tokens are predicted. Short
/// windows share a forward pass; long ones stream through the model's cache in chunks, which bounds memory.
/// `on_scores` is called in order of positions for each window.
void score_windows(model::LanguageModel& model, const data::TokenStore& store, int32_t start_id,
                   std::span<const Window> windows, const std::function<void(const WindowScores&)>& on_scores);

}  // namespace fox::eval
