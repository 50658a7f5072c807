#include <fmt/format.h>

#include "base/error.h"
#include "mixers/delta_net.h"
#include "mixers/forgetting_attn.h"
#include "mixers/hgrn2.h"
#include "mixers/mamba.h"
#include "mixers/mamba2.h"
#include "mixers/mixer.h"

namespace fox::mixers {
namespace {

// Attention is forgetting attention that does not forget.
std::unique_ptr<Mixer> make_attention(ModelConfig config, int64_t layer) {
  config.fgate_type = GateType::kNone;
  return std::make_unique<ForgettingAttn>(config, layer);
}

}  // namespace

std::unique_ptr<Mixer> make_mixer(const ModelConfig& config, int64_t layer, const SharedParameters& shared) {
  const auto kind = config.kind();
  if (kind == "forgetting_transformer") return std::make_unique<ForgettingAttn>(config, layer);
  if (kind == "transformer") return make_attention(config, layer);
  if (kind == "hgrn2") return std::make_unique<Hgrn2>(config, layer, shared);
  if (kind == "delta_net") return std::make_unique<DeltaNet>(config);
  if (kind == "mamba2") return std::make_unique<Mamba2>(config);
  if (kind == "samba") {
    if (config.is_samba_attention(layer)) return make_attention(config, layer);
    return std::make_unique<Mamba>(config);
  }
  throw Error(fmt::format("model_type \"{}\" is not built", config.model_type));
}

}  // namespace fox::mixers
