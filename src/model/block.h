#pragma once

#include <memory>
#include <optional>
#include <string>

#include "mixers/mixer.h"
#include "nn/mlp.h"
#include "nn/norm.h"

namespace fox::model {

/// One pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x)). The residual stream keeps its own dtype; the two
/// branches compute in `compute`.
class Block {
 public:
  Block(const ModelConfig& config, int64_t layer);

  at::Tensor forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot,
                     at::ScalarType compute);
  void collect(const std::string& prefix, nn::Parameters& out);
  void init(double std);
  const mixers::Mixer& mixer() const { return *mixer_; }

 private:
  nn::RmsNorm mixer_norm_, mlp_norm_;
  std::unique_ptr<mixers::Mixer> mixer_;
  nn::SwigluMlp mlp_;
};

}  // namespace fox::model
