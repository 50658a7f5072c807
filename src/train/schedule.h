#pragma once

#include <cstdint>

namespace fox::train {

/// Learning rate as a function of the tokens t consumed *before* a step (so the first step of a warm-up has rate 0):
///   t < W:  peak · t / W
///   else:   min + (peak - min) · ½ (1 + cos(π (t - W) / (T - W))), constant from T on.
struct Schedule {
  double peak = 1e-3;
  double minimum = 0;
  int64_t warmup_tokens = 0;  ///< W
  int64_t max_tokens = 0;     ///< T

  double at(int64_t tokens) const;
};

}  // namespace fox::train
