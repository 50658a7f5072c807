#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "eval/gates.h"

namespace fox::eval {

/// F and A of one head, pooled to at most `map_size` rows (HeadMap, layer and head left 0). q_TD and k_TD as nn::Probe
/// shows them; log_f_T undefined for a head without a gate, whose `forget` stays empty. `window` as in
/// ops::ForgettingAttnOptions. Memory grows with T × map scale, not T².
HeadMap attention_map(const at::Tensor& q_TD, const at::Tensor& k_TD, const at::Tensor& log_f_T,
                      std::optional<int64_t> window, int64_t map_size);

}  // namespace fox::eval
