#pragma once

#include "mixers/mixer.h"
#include "nn/linear.h"
#include "nn/norm.h"
#include "nn/short_conv.h"

namespace fox::mixers {

/// Mamba-2 (arXiv 2405.21060): one projection gives the gate, the values with the b and c of the state space model
/// (through a short convolution and SiLU together) and the time steps; the output is gated by silu, then normed.
class Mamba2 final : public Mixer {
 public:
  explicit Mamba2(const ModelConfig& config);

  at::Tensor forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) override;
  std::unique_ptr<nn::CacheSlot> make_slot() const override;
  void collect(const std::string& prefix, nn::Parameters& out) override;
  void init() override;
  double extra_flops_per_token(int64_t context) const override;

 private:
  at::Tensor time_step(const at::Tensor& logits_BTH) const;

  ModelConfig config_;
  int64_t inner_, state_size_;
  nn::Linear in_proj_, out_proj_;
  nn::ShortConv conv_;
  at::Tensor dt_bias_H_, a_log_H_, d_H_;
  nn::RmsNorm norm_;
};

}  // namespace fox::mixers
