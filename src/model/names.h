#pragma once

#include <string>

#include "config/model_config.h"

namespace fox::model {

/// How a model type's published checkpoints call their parts.
struct Names {
  std::string root;        ///< "model." or "backbone."
  std::string mixer;       ///< a layer's mixer, e.g. "attn."
  std::string mixer_norm;  ///< the norm before it
  std::string last_norm;   ///< the norm before the LM head
};

inline Names names_of(const ModelConfig& config) {
  const std::string kind = config.kind();
  if (kind == "mamba2") return {"backbone.", "mixer.", "norm.", "norm_f."};
  if (kind == "samba") return {"backbone.", "mixer.", "mixer_norm.", "norm_f."};
  return {"model.", "attn.", "attn_norm.", "norm."};
}

}  // namespace fox::model
