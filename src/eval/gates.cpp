#include "eval/gates.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "eval/attention_map.h"
#include "eval/number.h"
#include "ops/forgetting_attn.h"

namespace fox::eval {
namespace {

constexpr int64_t kBlock = 64;

/// Adds up what one layer shows in each window; a layer's tensors are dropped as soon as it has been looked at.
class GateProbe : public nn::Probe {
 public:
  GateProbe(const ModelConfig& config, double log_pruning_tolerance) {
    options_.window = config.window_size;
    options_.log_pruning_tolerance = log_pruning_tolerance;
  }

  void on_attention(int64_t layer, const at::Tensor& q_BTHD, const at::Tensor& k_BTHD,
                    const at::Tensor& log_f_BTH) override {
    const int64_t heads = q_BTHD.size(2);
    if (static_cast<int64_t>(sums_.size()) < (layer + 1) * heads) sums_.resize((layer + 1) * heads);
    for (int64_t h = 0; h < heads; ++h) sums_[layer * heads + h].tokens += q_BTHD.size(1);
    heads_ = heads;
    if (!log_f_BTH.defined()) return;
    const at::Tensor log_f_TH = log_f_BTH[0].to(at::kCPU, at::kDouble);
    const at::Tensor log_sum_H = log_f_TH.sum(0).contiguous(), gate_sum_H = log_f_TH.exp().sum(0).contiguous();
    const at::Tensor kept_H =
        ops::forgetting_attn_kept_share(q_BTHD, k_BTHD, log_f_BTH, options_)[0].to(at::kCPU, at::kDouble).contiguous();
    for (int64_t h = 0; h < heads; ++h) {
      Sums& sums = sums_[layer * heads + h];
      sums.gated = true;
      sums.log_gate += log_sum_H.const_data_ptr<double>()[h];
      sums.gate += gate_sum_H.const_data_ptr<double>()[h];
      sums.kept += kept_H.const_data_ptr<double>()[h];
    }
  }

  std::vector<HeadGates> heads(int64_t windows) const {
    std::vector<HeadGates> out;
    for (size_t i = 0; i < sums_.size(); ++i) {
      const Sums& sums = sums_[i];
      HeadGates head{static_cast<int64_t>(i) / heads_, static_cast<int64_t>(i) % heads_, 1, 0, {}, {}};
      if (sums.gated) {
        head.mean_gate = sums.gate / static_cast<double>(sums.tokens);
        head.mean_log_gate = sums.log_gate / static_cast<double>(sums.tokens);
        if (head.mean_log_gate < 0) head.memory_length = -1 / head.mean_log_gate;
        head.skipped_share = 1 - sums.kept / static_cast<double>(windows);
      }
      out.push_back(head);
    }
    return out;
  }

 private:
  struct Sums {
    bool gated = false;
    int64_t tokens = 0;
    double gate = 0, log_gate = 0, kept = 0;
  };
  ops::ForgettingAttnOptions options_;
  int64_t heads_ = 1;
  std::vector<Sums> sums_;  // layer by layer
};

/// Draws the maps of chosen heads.
class MapProbe : public nn::Probe {
 public:
  MapProbe(const ModelConfig& config, std::vector<std::pair<int64_t, int64_t>> chosen, int64_t map_size)
      : window_(config.window_size), chosen_(std::move(chosen)), map_size_(map_size) {}

  void on_attention(int64_t layer, const at::Tensor& q_BTHD, const at::Tensor& k_BTHD,
                    const at::Tensor& log_f_BTH) override {
    const int64_t group = q_BTHD.size(2) / k_BTHD.size(2);
    for (const auto& [chosen_layer, h] : chosen_) {
      if (chosen_layer != layer) continue;
      at::Tensor log_f_T;
      if (log_f_BTH.defined()) log_f_T = log_f_BTH[0].select(1, h);
      HeadMap map = attention_map(q_BTHD[0].select(1, h), k_BTHD[0].select(1, h / group), log_f_T, window_, map_size_);
      map.layer = layer;
      map.head = h;
      maps.push_back(std::move(map));
    }
  }

  std::vector<HeadMap> maps;

 private:
  std::optional<int64_t> window_;
  std::vector<std::pair<int64_t, int64_t>> chosen_;
  int64_t map_size_;
};

/// Heads evenly spread over the order of memory lengths, the shortest and the longest among them.
std::vector<std::pair<int64_t, int64_t>> choose_heads(const std::vector<HeadGates>& heads, int64_t count) {
  std::vector<size_t> order(heads.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return heads[a].mean_log_gate < heads[b].mean_log_gate; });
  const size_t n = std::min<size_t>(count, heads.size());
  std::vector<std::pair<int64_t, int64_t>> chosen;
  for (size_t i = 0; i < n; ++i) {
    const HeadGates& head = heads[order[n == 1 ? heads.size() - 1 : i * (heads.size() - 1) / (n - 1)]];
    chosen.emplace_back(head.layer, head.head);
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

void look_at_window(model::LanguageModel& model, const data::TokenStore& store, int32_t start_id, int64_t first,
                    int64_t length, nn::Probe& probe) {
  std::vector<int32_t> ids(length);
  ids[0] = start_id;
  store.read(first, std::span(ids).subspan(1));
  const at::Tensor ids_BT = at::from_blob(ids.data(), {1, length}, at::kInt).to(at::kLong);
  nn::Sequence sequence;
  sequence.probe = &probe;
  model.hidden(ids_BT.to(model.parameters().front().tensor.device()), sequence);
}

/// Blocks on the diagonal and beside it hold a pair of neighbouring tokens, whose gate product is hardly ever small.
double most_skippable(int64_t length) {
  const int64_t n = (length + kBlock - 1) / kBlock;
  return 1 - static_cast<double>(2 * n - 1) / (static_cast<double>(n) * static_cast<double>(n + 1) / 2);
}

}  // namespace

void check_options(const GateOptions& options) {
  if (options.length < 1) throw Error("the window length must be at least 1 token", "set it with --length");
  if (options.windows < 1) throw Error("at least one window is needed", "set it with --windows");
  if (!(options.log_pruning_tolerance <= 0)) {
    throw Error(fmt::format("ln of the pruning tolerance is {}, above 0", options.log_pruning_tolerance),
                "set it with --log-tolerance; usual is -10");
  }
  if (options.num_maps < 0) throw Error("the number of maps is below 0", "set it with --maps");
  if (options.map_size < 1) throw Error("a map needs at least one row", "set it with --map-size");
}

GateAnalysis analyse_gates(model::LanguageModel& model, const data::TokenStore& store, const data::Tokenizer& tokenizer,
                           const GateOptions& options) {
  check_options(options);
  if (store.num_tokens() < options.length) {
    throw Error(fmt::format("the held-out text has {} tokens, {} fewer than one window of {}", store.num_tokens(),
                            options.length - store.num_tokens(), options.length),
                "give more text with --data, or shorter windows with --length");
  }
  const at::NoGradGuard no_grad;
  GateAnalysis analysis;
  analysis.length = options.length;
  analysis.windows = std::min(options.windows, store.num_tokens() / options.length);
  analysis.log_pruning_tolerance = options.log_pruning_tolerance;
  analysis.most_skippable = most_skippable(options.length);
  GateProbe gates(model.config(), options.log_pruning_tolerance);
  for (int64_t w = 0; w < analysis.windows; ++w) {
    look_at_window(model, store, tokenizer.end_of_text(), w * options.length, options.length, gates);
  }
  analysis.heads = gates.heads(analysis.windows);
  analysis.has_gates = std::any_of(analysis.heads.begin(), analysis.heads.end(),
                                   [](const HeadGates& head) { return head.skipped_share.has_value(); });
  if (options.num_maps > 0) {
    MapProbe maps(model.config(), choose_heads(analysis.heads, options.num_maps), options.map_size);
    look_at_window(model, store, tokenizer.end_of_text(), 0, options.length, maps);
    analysis.maps = std::move(maps.maps);
  }
  return analysis;
}

nlohmann::json to_json(const GateAnalysis& analysis) {
  nlohmann::json heads = nlohmann::json::array(), maps = nlohmann::json::array();
  for (const HeadGates& head : analysis.heads) {
    heads.push_back({{"layer", head.layer},
                     {"head", head.head},
                     {"mean_gate", rounded(head.mean_gate)},
                     {"mean_log_gate", rounded(head.mean_log_gate)},
                     {"memory_length", rounded(head.memory_length)},
                     {"skipped_share", rounded(head.skipped_share)}});
  }
  const auto triangle = [](const std::vector<std::vector<float>>& rows) {
    nlohmann::json out = nlohmann::json::array();
    for (const std::vector<float>& row : rows) out.push_back(rounded(std::span<const float>(row), 3));
    return out;
  };
  for (const HeadMap& map : analysis.maps) {
    maps.push_back({{"layer", map.layer},
                    {"head", map.head},
                    {"scale", map.scale},
                    {"forget", triangle(map.forget)},
                    {"attention", triangle(map.attention)}});
  }
  return {{"length", analysis.length},
          {"windows", analysis.windows},
          {"has_gates", analysis.has_gates},
          {"log_pruning_tolerance", analysis.log_pruning_tolerance},
          {"most_skippable", rounded(analysis.most_skippable)},
          {"heads", heads},
          {"maps", maps}};
}

}  // namespace fox::eval
