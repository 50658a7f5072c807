#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "data/token_store.h"
#include "data/tokenizer.h"
#include "model/language_model.h"

namespace fox::eval {

struct GateOptions {
  int64_t length = 0;                  ///< tokens a window
  int64_t windows = 1;                 ///< windows that do not overlap, from the beginning of the store
  double log_pruning_tolerance = -10;  ///< ln ε for the share of blocks that pruning would skip
  int64_t num_maps = 0;                ///< heads whose F and A matrices are kept, spread over the memory lengths
  int64_t map_size = 128;              ///< rows and columns of a map at most
};

/// Throws fox::Error when an option is out of range.
void check_options(const GateOptions& options);

/// One head over all tokens of all windows. A head without a gate has mean_gate 1, and no memory length or share.
struct HeadGates {
  int64_t layer = 0, head = 0;
  double mean_gate = 1;                 ///< mean f
  double mean_log_gate = 0;             ///< mean ln f
  std::optional<double> memory_length;  ///< 1 / (-mean ln f), tokens; nothing when the head never forgets
  std::optional<double> skipped_share;  ///< of all causal 64×64 blocks, those that pruning would skip
};

/// F and A of one head in the first window (as in arXiv 2503.02130, Figure 3), lower triangles row by row (row r holds
/// r + 1 values), each value standing for scale × scale entries: forget is the mean of F_ij = exp(D_ij) over its causal
/// entries, attention the mean over queries of the weights summed over keys, so that rows of attention sum to 1.
struct HeadMap {
  int64_t layer = 0, head = 0, scale = 1;
  std::vector<std::vector<float>> forget, attention;
};

struct GateAnalysis {
  int64_t length = 0, windows = 0;
  bool has_gates = false;
  double log_pruning_tolerance = 0;
  double most_skippable =
      0;  ///< share of blocks that pruning can skip at all: those neither on nor beside the diagonal
  std::vector<HeadGates> heads;
  std::vector<HeadMap> maps;
};

/// Runs the model over held-out tokens and looks at its gates through nn::Probe. Throws fox::Error when the store is
/// shorter than one window.
GateAnalysis analyse_gates(model::LanguageModel& model, const data::TokenStore& store, const data::Tokenizer& tokenizer,
                           const GateOptions& options);

/// As docs/formats.md describes eval/gates.json, without the fields that say where it came from.
nlohmann::json to_json(const GateAnalysis& analysis);

}  // namespace fox::eval
