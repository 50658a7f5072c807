#pragma once

#include <memory>
#include <string>

#include "config/model_config.h"
#include "nn/sequence.h"

namespace fox::mixers {

/// A layer that mixes tokens. Given no slot it trains (all tokens at once); given a slot it continues from what the
/// slot holds and leaves there what the next call needs: prefill in chunks and decode are the same function.
class Mixer {
 public:
  virtual ~Mixer() = default;

  /// x_BTC (B, T, C) → (B, T, C).
  virtual at::Tensor forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) = 0;
  /// An empty slot for this layer.
  virtual std::unique_ptr<nn::CacheSlot> make_slot() const = 0;
  /// Appends the parameters, their names led by `prefix` (ends with '.').
  virtual void collect(const std::string& prefix, nn::Parameters& out) = 0;
  /// The published initialisation; draws from ATen's default generator.
  virtual void init() = 0;
  /// Forward FLOPs a token beside the 2N of the parameters, at context length L (arXiv 2503.02130, Table 6).
  virtual double extra_flops_per_token(int64_t context) const = 0;
};

/// Parameters that belong to no layer; the model lists them, mixers read them.
struct SharedParameters {
  at::Tensor lower_bounds;  ///< (layers, C), HGRN2 with use_lower_bound; else undefined
};

/// The only list of mixers: builds layer `layer` of a model with `config`.
std::unique_ptr<Mixer> make_mixer(const ModelConfig& config, int64_t layer, const SharedParameters& shared);

}  // namespace fox::mixers
