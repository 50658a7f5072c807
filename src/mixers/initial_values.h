#pragma once

#include <ATen/core/Tensor.h>

#include "nn/linear.h"

namespace fox::mixers {

/// Xavier-uniform with gain 2^-2.5, as the mixers of HGRN2 and DeltaNet start.
void init_xavier(nn::Linear& linear);

}  // namespace fox::mixers
