#pragma once

#include <memory>
#include <optional>
#include <string>

#include "config/model_config.h"
#include "mixers/mixer.h"
#include "nn/linear.h"
#include "nn/norm.h"

namespace fox::mixers {

/// Forgetting attention, FoX (LLaMA) and FoX (Pro) (arXiv 2503.02130, section 3): softmax attention whose logits decay
/// by a data-dependent forget gate. Each part of the Pro block stands on its own: token shift of keys and values,
/// QK-norm, output norm, output gate; and rotary embedding, sliding window and grouped queries. With
/// fgate_type "none" it is plain attention, so the Transformer baselines are this mixer too.
class ForgettingAttn final : public Mixer {
 public:
  /// `layer` is what a probe is told. Parameters in float32 on the CPU, values undefined.
  ForgettingAttn(const ModelConfig& config, int64_t layer);

  at::Tensor forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) override;
  std::unique_ptr<nn::CacheSlot> make_slot() const override;
  void collect(const std::string& prefix, nn::Parameters& out) override;
  void init() override;
  double extra_flops_per_token(int64_t context) const override;

 private:
  void init_in_samba();
  struct Projected;
  Projected project(const at::Tensor& x_BTC) const;
  std::optional<at::Tensor> log_gate(const Projected& projected) const;
  at::Tensor logit_bound() const;
  at::Tensor attend(const Projected& projected, const nn::Sequence& sequence, nn::CacheSlot* slot) const;
  /// Output norm and output gate, as far as the model has them.
  at::Tensor gated(const at::Tensor& o_BTC, const at::Tensor& gate_BTC) const;

  ModelConfig config_;
  int64_t layer_, head_dim_;
  nn::Linear q_proj_, k_proj_, v_proj_, o_proj_;
  nn::PackedWeights projections_;
  std::optional<nn::Linear> k_shift_proj_, v_shift_proj_, fgate_proj_, ogate_proj_;
  at::Tensor fgate_bias_;  // (H,) for gates that do not look at the data
  std::optional<nn::RmsNorm> q_norm_, k_norm_, output_norm_;
};

}  // namespace fox::mixers
