#pragma once

#include <ATen/core/Tensor.h>

namespace fox::ops {

/// Cosines and sines of the rotary angles (offset + t) * base^(-2i/D).
struct RotaryTable {
  at::Tensor cos, sin;  ///< (time, D / 2), contiguous, dtype and device of `options`
};

/// The angles are computed in float64 on the CPU, whatever the dtype: at position 10⁶ a float32 angle is off by 0.06.
/// Tables up to 2²⁰ positions are kept (one for each base, D, dtype and device) and grow by doubling, so that neither
/// training nor decoding token by token computes a cosine twice. One that was outgrown stays where it is, less than the
/// newest in all: a CUDA graph may read it (ops/device_graph.h). May be called from any thread.
RotaryTable rotary_table(int64_t time, int64_t dim, double base, int64_t offset, const at::TensorOptions& options);

}  // namespace fox::ops
