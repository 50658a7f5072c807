#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fox::train {

double Schedule::at(int64_t tokens) const {
  if (tokens < warmup_tokens) return peak * static_cast<double>(tokens) / static_cast<double>(warmup_tokens);
  if (tokens >= max_tokens) return minimum;
  const double done = static_cast<double>(tokens - warmup_tokens) / static_cast<double>(max_tokens - warmup_tokens);
  return minimum + (peak - minimum) * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

}  // namespace fox::train
