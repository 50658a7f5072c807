#pragma once

#include <memory>
#include <optional>
#include <string>

#include "mixers/mixer.h"
#include "nn/mlp.h"
#include "nn/norm.h"
#include "nn/residual_stream.h"

namespace fox::model {

/// One pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x)) where the model has MLPs (all but Mamba-2). The
/// residual stream keeps its own dtype; the branches compute in `compute`, and the last one is left for the next norm
/// to add (nn/residual_stream.h).
class Block {
 public:
  Block(const ModelConfig& config, int64_t layer, const mixers::SharedParameters& shared);

  void forward(nn::ResidualStream& stream, const nn::Sequence& sequence, nn::CacheSlot* slot, at::ScalarType compute);
  /// Parameters by their published names, led by `prefix` (ends with '.').
  void collect(const std::string& prefix, nn::Parameters& out);
  void init();
  /// Whether the MLP keeps only its input for the backward pass.
  void set_recompute_mlp(bool on) { recompute_mlp_ = on; }
  const mixers::Mixer& mixer() const { return *mixer_; }

 private:
  void init_mlp();
  at::Tensor apply_mlp(const at::Tensor& x_BTC) const;

  ModelConfig config_;
  nn::RmsNorm mixer_norm_;
  std::unique_ptr<mixers::Mixer> mixer_;
  std::optional<nn::RmsNorm> mlp_norm_;
  std::optional<nn::SwigluMlp> mlp_;
  bool recompute_mlp_ = false;
};

}  // namespace fox::model
