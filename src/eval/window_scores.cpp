#include "eval/window_scores.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <vector>

#include "base/error.h"

namespace fox::eval {
namespace {

// Tokens of one forward pass: enough for matrix products to be efficient, and few enough for their activations to stay
// small (at C = 1536 the MLP's are 28 KB a token).
constexpr int64_t kPassTokens = 4096;
// Logits that exist at once: on a CPU few enough for its caches, on a GPU enough for few kernels.
constexpr int64_t kLogitBytes = int64_t{16} << 20;
constexpr int64_t kLogitBytesOfGpu = int64_t{1} << 30;

at::Tensor head_weight(const model::LanguageModel& model) {
  const at::Tensor* embedding = nullptr;
  for (const nn::Parameter& parameter : model.parameters()) {
    if (parameter.name == "lm_head.weight") return parameter.tensor;
    if (parameter.name == "model.embeddings.weight") embedding = &parameter.tensor;
  }
  if (embedding == nullptr) throw Error("the model has neither lm_head.weight nor model.embeddings.weight");
  return *embedding;  // tied
}

struct Scores {
  at::Tensor loss_N;     // float64, CPU
  at::Tensor correct_N;  // uint8, CPU
};

/// The LM head in pieces of rows, so that logits of all tokens never exist together.
Scores score_rows(const at::Tensor& x_NC, const at::Tensor& w_VC, const at::Tensor& labels_N) {
  const int64_t rows = x_NC.size(0);
  const at::ScalarType exact = x_NC.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t logit_bytes = w_VC.is_cpu() ? kLogitBytes : kLogitBytesOfGpu;
  const int64_t piece = std::max<int64_t>(1, logit_bytes / (4 * w_VC.size(0)));
  const at::Tensor w_CV = w_VC.to(x_NC.scalar_type()).t();
  Scores scores{at::empty({rows}, at::kDouble), at::empty({rows}, at::kByte)};
  for (int64_t first = 0; first < rows; first += piece) {
    const int64_t n = std::min(piece, rows - first);
    const at::Tensor logits_NV = at::matmul(x_NC.narrow(0, first, n), w_CV).to(exact);
    const at::Tensor labels = labels_N.narrow(0, first, n);
    const at::Tensor of_label = logits_NV.gather(1, labels.unsqueeze(1)).squeeze(1);
    scores.loss_N.narrow(0, first, n).copy_(at::logsumexp(logits_NV, 1) - of_label);
    // Not argmax, which took an eighth of an evaluation: the largest number alone is found by whole vectors.
    scores.correct_N.narrow(0, first, n).copy_(logits_NV.amax(1).eq(of_label));
  }
  return scores;
}

/// Rows of equal length: shorter windows are filled up behind their end, where nothing they score can see it.
struct Group {
  std::span<const Window> windows;
  size_t first_window = 0;
  int64_t length = 0;
  std::vector<int32_t> ids;  // row by row
};

Group read_group(const data::TokenStore& store, std::span<const Window> windows, size_t first_window) {
  Group group{windows, first_window, 0, {}};
  for (const Window& window : windows) group.length = std::max(group.length, window.length);
  group.ids.resize(windows.size() * group.length);
  for (size_t b = 0; b < windows.size(); ++b) {
    store.read(windows[b].first, std::span(group.ids).subspan(b * group.length, windows[b].length));
  }
  return group;
}

void score_group(model::LanguageModel& model, const at::Tensor& w_VC, const Group& group, int32_t start_id,
                 const std::function<void(const WindowScores&)>& on_scores) {
  const auto rows = static_cast<int64_t>(group.windows.size());
  const at::Device device = w_VC.device();
  const at::Tensor labels_BT =
      at::from_blob(const_cast<int32_t*>(group.ids.data()), {rows, group.length}, at::kInt).to(at::kLong);
  at::Tensor ids_BT = at::full_like(labels_BT, start_id);
  ids_BT.narrow(1, 1, group.length - 1).copy_(labels_BT.narrow(1, 0, group.length - 1));
  model::Cache cache;
  if (group.length > kPassTokens) cache = model.make_cache();
  for (int64_t first = 0; first < group.length; first += kPassTokens) {
    const int64_t n = std::min(kPassTokens, group.length - first);
    const at::Tensor x_BTC =
        model.hidden(ids_BT.narrow(1, first, n).to(device), {}, group.length > kPassTokens ? &cache : nullptr);
    const at::Tensor labels = labels_BT.narrow(1, first, n).to(device).reshape({rows * n});
    const Scores scores = score_rows(x_BTC.reshape({rows * n, x_BTC.size(2)}), w_VC, labels);
    for (int64_t b = 0; b < rows; ++b) {
      const auto valid = static_cast<size_t>(std::clamp<int64_t>(group.windows[b].length - first, 0, n));
      if (valid == 0) continue;
      on_scores({group.first_window + static_cast<size_t>(b),
                 first,
                 std::span(group.ids).subspan(b * group.length + first, valid),
                 {scores.loss_N.const_data_ptr<double>() + b * n, valid},
                 {scores.correct_N.const_data_ptr<uint8_t>() + b * n, valid}});
    }
  }
}

}  // namespace

void score_windows(model::LanguageModel& model, const data::TokenStore& store, int32_t start_id,
                   std::span<const Window> windows, const std::function<void(const WindowScores&)>& on_scores) {
  const at::NoGradGuard no_grad;
  const at::Tensor w_VC = head_weight(model);
  for (size_t first = 0; first < windows.size();) {
    size_t count = 1;
    int64_t longest = windows[first].length;
    while (first + count < windows.size()) {
      const int64_t with_next = std::max(longest, windows[first + count].length);
      if (with_next * static_cast<int64_t>(count + 1) > kPassTokens) break;
      longest = with_next;
      ++count;
    }
    score_group(model, w_VC, read_group(store, windows.subspan(first, count), first), start_id, on_scores);
    first += count;
  }
}

}  // namespace fox::eval
