#include "mixers/hgrn2.h"

#include <ATen/ATen.h>

#include "mixers/initial_values.h"
#include "mixers/recurrent_slot.h"
#include "nn/linear_together.h"
#include "ops/hgrn2.h"
#include "ops/hgrn2_gate.h"

namespace fox::mixers {

Hgrn2::Hgrn2(const ModelConfig& config, int64_t layer, const SharedParameters& shared)
    : config_(config),
      layer_(layer),
      lower_bounds_(shared.lower_bounds),
      q_proj_(config.hidden_size, config.hidden_size),
      f_proj_(config.hidden_size, config.hidden_size),
      i_proj_(config.hidden_size, config.hidden_size),
      o_proj_(config.hidden_size, config.hidden_size),
      g_norm_(config.hidden_size, config.norm_eps) {}

at::Tensor Hgrn2::forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) {
  const auto projected = nn::linear_together(x_BTC, {q_proj_.weight, f_proj_.weight, i_proj_.weight}, projections_);
  // Bounds rise from layer to layer, from 0.
  std::optional<at::Tensor> lower_C;
  if (config_.apply_lower_bound && layer_ > 0) lower_C = lower_bounds_.softmax(0).narrow(0, 1, layer_).sum(0);
  const auto gate = ops::hgrn2_gate(projected[1], lower_C);
  const auto heads = [&](const at::Tensor& y) { return y.unflatten(-1, {-1, config_.expand_ratio}); };
  const auto o_BTHV = run_recurrence(
      sequence, static_cast<RecurrentSlot*>(slot),
      {heads(at::silu(projected[0])), heads(gate.k), heads(projected[2]), heads(gate.log_g)},
      [](const auto& in, const auto& options) { return ops::hgrn2(in[0], in[1], in[2], in[3], options); });
  return o_proj_.forward(g_norm_.forward(o_BTHV.flatten(2)));
}

std::unique_ptr<nn::CacheSlot> Hgrn2::make_slot() const { return std::make_unique<RecurrentSlot>(); }

void Hgrn2::collect(const std::string& prefix, nn::Parameters& out) {
  q_proj_.collect(prefix + "q_proj.", out);
  f_proj_.collect(prefix + "f_proj.", out);
  i_proj_.collect(prefix + "i_proj.", out);
  g_norm_.collect(prefix + "g_norm.", out);
  o_proj_.collect(prefix + "o_proj.", out);
}

void Hgrn2::init() {
  for (auto* linear : {&q_proj_, &f_proj_, &i_proj_, &o_proj_}) init_xavier(*linear);
  g_norm_.init();
}

double Hgrn2::extra_flops_per_token(int64_t) const {
  return 5.0 * static_cast<double>(config_.hidden_size * config_.expand_ratio);
}

}  // namespace fox::mixers
