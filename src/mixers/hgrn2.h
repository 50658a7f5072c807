#pragma once

#include "mixers/mixer.h"
#include "nn/linear.h"
#include "nn/norm.h"

namespace fox::mixers {

/// HGRN2 (arXiv 2404.07904): gated linear attention with a forget gate g for every key channel and keys 1 - g, norm
/// over the whole width. With apply_lower_bound, gates of layer i stay above Σ_{l=1..i} softmax_l(lower_bounds); the
/// published runs have the parameter but never passed it on (arXiv 2503.02130's code), so that is off by default.
class Hgrn2 final : public Mixer {
 public:
  Hgrn2(const ModelConfig& config, int64_t layer, const SharedParameters& shared);

  at::Tensor forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) override;
  std::unique_ptr<nn::CacheSlot> make_slot() const override;
  void collect(const std::string& prefix, nn::Parameters& out) override;
  void init() override;
  double extra_flops_per_token(int64_t context) const override;

 private:
  ModelConfig config_;
  int64_t layer_;
  at::Tensor lower_bounds_;  // (layers, C), all layers'
  nn::Linear q_proj_, f_proj_, i_proj_, o_proj_;
  nn::PackedWeights projections_;
  nn::RmsNorm g_norm_;
};

}  // namespace fox::mixers
