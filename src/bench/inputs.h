#pragma once

#include <ATen/core/Tensor.h>

#include <string>

// What the benchmarks feed to operators.
namespace fox::bench {

/// Throws fox::Error on a name other than float32, float64, bfloat16, float16.
at::ScalarType dtype_of(const std::string& name);

/// x over its root mean square along the last dimension, as QK-norm of unit scale leaves it.
at::Tensor rms_normalised(const at::Tensor& x);

/// (H,): what |q·k| / sqrt(D) of such rows can reach, roundings to 16 bits included.
at::Tensor logit_bound(int64_t heads, int64_t head_dim, at::Device device);

/// Log gates (B, T, H) in float64 whose heads have decay times spaced evenly in log from 8 to 65,536 tokens:
/// logsigmoid(base_h + N(0, 1)).
at::Tensor log_spaced_gates(at::IntArrayRef shape, at::Device device);

/// ln ε of the pruning that is measured.
constexpr double kLogPruningTolerance = -10;
/// Decay times that log-spaced gates have over the heads, in tokens.
constexpr double kShortestDecay = 8, kLongestDecay = 65536;

/// torch's attention restricted to one of its GPU kernels ("cudnn", "flash") while this lives, or ("torch") as it
/// chooses itself.
class SdpKernel {
 public:
  explicit SdpKernel(const std::string& name);
  ~SdpKernel();
  SdpKernel(const SdpKernel&) = delete;
  SdpKernel& operator=(const SdpKernel&) = delete;
};

}  // namespace fox::bench
