#pragma once

#include "mixers/mixer.h"
#include "nn/linear.h"
#include "nn/norm.h"
#include "nn/short_conv.h"

namespace fox::mixers {

/// DeltaNet (arXiv 2406.06484): the delta rule on queries, keys and values that went through a short convolution and
/// SiLU, queries and keys then scaled to length 1; norm of each head, its weight shared by the heads.
class DeltaNet final : public Mixer {
 public:
  explicit DeltaNet(const ModelConfig& config);

  at::Tensor forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) override;
  std::unique_ptr<nn::CacheSlot> make_slot() const override;
  void collect(const std::string& prefix, nn::Parameters& out) override;
  void init() override;
  double extra_flops_per_token(int64_t context) const override;

 private:
  ModelConfig config_;
  nn::Linear q_proj_, k_proj_, v_proj_, b_proj_, o_proj_;
  nn::PackedWeights projections_;
  nn::ShortConv q_conv_, k_conv_, v_conv_;
  nn::RmsNorm o_norm_;
};

}  // namespace fox::mixers
