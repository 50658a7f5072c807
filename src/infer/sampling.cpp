#include "infer/sampling.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>

#include "base/error.h"

namespace fox::infer {
namespace {

int64_t argmax(std::span<const double> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

std::vector<double> checked_logits(const at::Tensor& logits_V) {
  const at::Tensor values = logits_V.detach().to(at::kCPU, at::kDouble).contiguous();
  if (values.dim() != 1 || values.numel() == 0) throw Error("sampling needs the logits of one position, shape (V,)");
  std::vector<double> logits(values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel());
  bool any_finite = false;
  for (double logit : logits) {
    if (std::isnan(logit) || logit == INFINITY) {
      throw Error("the model's logits are not finite, so no token can be drawn",
                  "the weights may be damaged or the training run may have diverged; see `fox inspect`");
    }
    any_finite |= std::isfinite(logit);
  }
  if (!any_finite)
    throw Error("every logit is -inf, so no token can be drawn",
                "the model's weights are damaged or its training diverged");
  return logits;
}

/// Ids from the most to the least likely; equals in order of id, so that a cut among them is the same everywhere.
std::vector<int64_t> by_likelihood(std::span<const double> p) {
  std::vector<int64_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return p[a] > p[b]; });
  return order;
}

void normalise(std::vector<double>& p) {
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= total;
}

/// How many of the `order`ed tokens top_k and top_p leave.
size_t kept_tokens(std::span<const double> p, std::span<const int64_t> order, const SamplingOptions& options) {
  size_t keep = options.top_k > 0 ? std::min<size_t>(options.top_k, p.size()) : p.size();
  if (options.top_p >= 1) return keep;
  double total = 0;
  for (size_t n = 0; n < keep; ++n) total += p[order[n]];
  double sum = 0;
  for (size_t n = 0; n < keep; ++n) {
    sum += p[order[n]];
    if (sum >= options.top_p * total) return n + 1;
  }
  return keep;
}

}  // namespace

void SamplingOptions::validate() const {
  if (!(temperature >= 0) || !std::isfinite(temperature)) {
    throw Error(fmt::format("temperature is {}, but must be 0 or more", temperature),
                "0 always takes the most likely token; 1 draws from the model's own distribution");
  }
  if (top_k < 0) throw Error(fmt::format("top_k is {}, but must be 0 or more", top_k), "0 keeps all tokens");
  if (!(top_p > 0) || top_p > 1) {
    throw Error(fmt::format("top_p is {}, but must be above 0 and at most 1", top_p), "1 keeps all tokens");
  }
}

std::vector<double> sampling_probabilities(const at::Tensor& logits_V, const SamplingOptions& options) {
  options.validate();
  std::vector<double> p = checked_logits(logits_V);
  const int64_t best = argmax(p);
  if (options.temperature == 0) {
    std::fill(p.begin(), p.end(), 0.0);
    p[best] = 1;
    return p;
  }
  const double largest = p[best];
  for (double& x : p) x = std::exp((x - largest) / options.temperature);
  if (options.top_k > 0 || options.top_p < 1) {
    const std::vector<int64_t> order = by_likelihood(p);
    for (size_t n = kept_tokens(p, order, options); n < order.size(); ++n) p[order[n]] = 0;
  }
  normalise(p);
  return p;
}

Sampler::Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) { options_.validate(); }

int32_t Sampler::draw(const at::Tensor& logits_V) {
  const std::vector<double> p = sampling_probabilities(logits_V, options_);
  if (options_.temperature == 0) return static_cast<int32_t>(argmax(p));
  // Written out because std::uniform_real_distribution may differ between standard libraries.
  const double u = static_cast<double>(random_() >> 11) * 0x1p-53;
  double sum = 0;
  int32_t last = 0;
  for (size_t id = 0; id < p.size(); ++id) {
    if (p[id] == 0) continue;
    last = static_cast<int32_t>(id);
    sum += p[id];
    if (u < sum) return last;
  }
  return last;  // rounding left the sum below 1
}

}  // namespace fox::infer
