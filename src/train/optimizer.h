#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "nn/sequence.h"

namespace fox::train {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;  ///< of parameters whose Parameter::decay is set
};

/// The gradients of a step as their device knows them; reading any of it on the host waits for the device.
struct GradientNorms {
  std::vector<size_t> parameters;  ///< which parameters have a gradient (index into the list)
  at::Tensor each;                 ///< (number of these,) float64: L2 norm of each
  at::Tensor global;               ///< scalar float64: L2 norm over all together

  /// What all gradients are to be divided by so that their global norm is at most `max_norm`:
  /// max(1, (norm + 1e-6) / max_norm), scalar float64.
  at::Tensor divisor(double max_norm) const;
};

/// Norms of all gradients, each and together added up in float64. Throws fox::Error when no parameter has one.
GradientNorms gradient_norms(const nn::Parameters& parameters);

/// What a step is to heed; the device decides by it, the host need not know.
struct StepGuard {
  at::Tensor divisor;  ///< scalar float64: gradients are divided by this
  at::Tensor apply;    ///< scalar bool: else the step changes nothing and does not count
};

/// AdamW (arXiv 1711.05101) with bias correction, through ATen's fused kernel: θ ← θ (1 - lr λ), then
/// θ ← θ - lr m̂ / (√v̂ + eps). Two groups: with decay and without. Holds on to the parameters it was made with, and
/// reads their gradients (dividing them in place); a trainable parameter without a gradient counts as one whose
/// gradient is 0. Waits for nothing on a GPU.
class AdamW {
 public:
  /// `device`: where the parameters are, for a rank whose share of a small model is nothing.
  AdamW(const nn::Parameters& parameters, const AdamWOptions& options, at::Device device);

  /// `lr` as device_lr() gives it.
  void step(const at::Tensor& lr, const StepGuard& guard);
  /// The same, unconditionally.
  void step(double lr);
  /// The learning rate where the fused kernel reads it: a scalar on the parameters' device, float32 on a GPU.
  at::Tensor device_lr(double lr) const;

  /// Steps taken, which bias correction needs (waits for the device).
  int64_t steps() const;

  /// What state() puts before a parameter's name: one tensor of each kind a parameter, in its shape.
  static constexpr std::array kMoments{"exp_avg.", "exp_avg_sq."};
  /// The moments, "exp_avg.NAME" and "exp_avg_sq.NAME" (the optimizer's own tensors, not copies).
  checkpoint::NamedTensors state() const;
  /// Takes over what state() gave. Throws fox::Error, naming `where`, when tensors are missing, extra or misshapen.
  void restore(const checkpoint::NamedTensors& state, int64_t steps, const std::string& where);
  void set_steps(int64_t steps);

 private:
  struct Group {
    double weight_decay;
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters, exp_avg, exp_avg_sq;
  };
  void step(Group& group, const at::Tensor& lr, const StepGuard& guard, const at::Tensor& skip);

  AdamWOptions options_;
  std::vector<Group> groups_;
  at::Tensor steps_;  ///< scalar, on the parameters' device; the fused kernel counts in float32, exact up to 2^24
};

}  // namespace fox::train
