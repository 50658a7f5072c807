#pragma once

#include <string>
#include <vector>

#include "config/model_config.h"

namespace fox {

/// The models of arXiv 2503.02130, tables 4 and 5, by short names: fox_pro, fox_llama, transformer_pro,
/// transformer_llama, transformer_swa, samba, mamba2, hgrn2, delta_net.
const std::vector<std::string>& published_models();
/// Their sizes: 125m, 360m, 760m (and tiny, which is nobody's: some thousand parameters to try things with).
const std::vector<std::string>& published_sizes();

/// The configuration of one of them, vocabulary 50257. Throws UsageError naming the nearest name when there is none.
ModelConfig published_model(const std::string& model, const std::string& size);

}  // namespace fox
