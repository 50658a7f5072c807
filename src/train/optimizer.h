#pragma once

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

/// AdamW (arXiv 1711.05101) with bias correction, through ATen's fused kernel: θ ← θ (1 - lr λ), then
/// θ ← θ - lr m̂ / (√v̂ + eps). Two groups: with decay and without. Holds on to the parameters it was made with, and
/// reads their gradients; a trainable parameter without a gradient counts as one whose gradient is 0.
class AdamW {
 public:
  AdamW(const nn::Parameters& parameters, const AdamWOptions& options);

  void step(double lr);

  /// Steps taken, which bias correction needs.
  int64_t steps() const { return steps_; }

  /// The moments, "exp_avg.NAME" and "exp_avg_sq.NAME" (the optimizer's own tensors, not copies).
  checkpoint::NamedTensors state() const;
  /// Takes over what state() gave. Throws fox::Error, naming `where`, when tensors are missing, extra or misshapen.
  void restore(const checkpoint::NamedTensors& state, int64_t steps, const std::string& where);

 private:
  struct Group {
    double weight_decay;
    std::vector<std::string> names;
    std::vector<at::Tensor> parameters, exp_avg, exp_avg_sq, step_counts;
  };
  AdamWOptions options_;
  std::vector<Group> groups_;
  int64_t steps_ = 0;
};

/// L2 norm over all gradients together, added up in float64.
double gradient_norm(const nn::Parameters& parameters);

/// Scales all gradients by min(1, max_norm / (norm + 1e-6)), `norm` being their global norm.
void clip_gradients(const nn::Parameters& parameters, double norm, double max_norm);

}  // namespace fox::train
