#pragma once

#include "mixers/mixer.h"
#include "nn/linear.h"
#include "nn/short_conv.h"

namespace fox::mixers {

/// Mamba (arXiv 2312.00752), the recurrent layers of Samba (arXiv 2406.07522): values through a short convolution and
/// SiLU; from them the time steps (through a low rank), b and c of the selective scan; the output is gated by silu.
class Mamba final : public Mixer {
 public:
  explicit Mamba(const ModelConfig& config);

  at::Tensor forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) override;
  std::unique_ptr<nn::CacheSlot> make_slot() const override;
  void collect(const std::string& prefix, nn::Parameters& out) override;
  void init() override;
  double extra_flops_per_token(int64_t context) const override;

 private:
  ModelConfig config_;
  int64_t inner_, state_size_, rank_;
  nn::Linear in_proj_, x_proj_, dt_proj_, out_proj_;
  nn::ShortConv conv_;
  at::Tensor a_log_IN_, d_I_;
};

}  // namespace fox::mixers
