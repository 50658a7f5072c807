#include "mixers/initial_values.h"

#include <cmath>

namespace fox::mixers {

void init_xavier(nn::Linear& linear) {
  const auto fan = static_cast<double>(linear.weight.size(0) + linear.weight.size(1));
  linear.init_uniform(std::pow(2.0, -2.5) * std::sqrt(6 / fan));
}

}  // namespace fox::mixers
