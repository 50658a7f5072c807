#include "nn/sequence.h"

#include <ATen/TensorOperators.h>

namespace fox::nn {

std::optional<at::Tensor> Sequence::padding_of(int64_t length) const {
  if (!seq_start) return std::nullopt;
  return (*seq_start - offset).clamp(0, length);
}

}  // namespace fox::nn
