#include "mixers/mamba2.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "mixers/initial_values.h"
#include "mixers/recurrent_slot.h"
#include "ops/dtypes.h"
#include "ops/mamba2.h"
#include "ops/swiglu.h"
#include "ops/time_step.h"

namespace fox::mixers {

Mamba2::Mamba2(const ModelConfig& config)
    : config_(config),
      inner_(config.inner_width()),
      state_size_(config.state_size),
      in_proj_(config.hidden_size, 2 * inner_ + 2 * state_size_ + config.num_heads),
      out_proj_(inner_, config.hidden_size),
      conv_(inner_ + 2 * state_size_, config.conv_kernel, config.use_conv_bias),
      dt_bias_H_(at::empty({config.num_heads}, at::kFloat)),
      a_log_H_(at::empty({config.num_heads}, at::kFloat)),
      d_H_(at::empty({config.num_heads}, at::kFloat)),
      norm_(inner_, config.norm_eps) {}

at::Tensor Mamba2::time_step(const at::Tensor& logits_BTH) const {
  const auto dt = ops::time_step(logits_BTH, dt_bias_H_);
  const double low = config_.time_step_limit[0], high = config_.time_step_limit[1];
  const bool limited = low > 0 || high < std::numeric_limits<double>::max();
  return limited ? dt.clamp(low, high) : dt;
}

at::Tensor Mamba2::forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) {
  auto* memory = static_cast<RecurrentSlot*>(slot);
  const auto parts =
      in_proj_.forward(x_BTC).split_with_sizes({inner_, inner_ + 2 * state_size_, config_.num_heads}, -1);
  const auto convolved = conv_.forward(parts[1], sequence, memory ? &memory->conv[0] : nullptr);
  const auto values = convolved.split_with_sizes({inner_, state_size_, state_size_}, -1);
  const auto x_BTHP = values[0].unflatten(-1, {config_.num_heads, config_.ssm_head_dim});
  const auto dt_BTH = time_step(parts[2]);
  const auto a_H = -ops::cast(a_log_H_, dt_BTH.scalar_type()).exp();
  const auto y_BTHP = run_recurrence(sequence, memory, {x_BTHP, dt_BTH, a_H, values[1], values[2], d_H_},
                                     [chunk = config_.chunk_size](const auto& in, ops::RecurrenceOptions options) {
                                       options.chunk_size = chunk;
                                       return ops::mamba2(in[0], in[1], in[2], in[3], in[4], in[5], options);
                                     });
  return out_proj_.forward(norm_.forward(ops::swiglu(parts[0], y_BTHP.flatten(2))));
}

std::unique_ptr<nn::CacheSlot> Mamba2::make_slot() const {
  auto slot = std::make_unique<RecurrentSlot>();
  slot->conv.resize(1);
  return slot;
}

void Mamba2::collect(const std::string& prefix, nn::Parameters& out) {
  out.push_back({prefix + "dt_bias", dt_bias_H_, /*decay=*/false});
  out.push_back({prefix + "A_log", a_log_H_, /*decay=*/false});
  out.push_back({prefix + "D", d_H_, /*decay=*/false});
  in_proj_.collect(prefix + "in_proj.", out);
  conv_.collect(prefix + "conv1d.", out);
  norm_.collect(prefix + "norm.", out);
  out_proj_.collect(prefix + "out_proj.", out);
}

void Mamba2::init() {
  at::NoGradGuard no_grad;
  in_proj_.init_default();
  // Each layer adds one branch to the residual stream.
  const double residual = 1 / std::sqrt(static_cast<double>(config_.num_hidden_layers));
  out_proj_.init_default(config_.rescale_prenorm_residual ? residual : 1);
  conv_.init();
  norm_.init();
  a_log_H_.copy_(at::arange(1, config_.num_heads + 1, at::kDouble).log());
  d_H_.fill_(1);
  init_time_steps(dt_bias_H_, config_);
}

double Mamba2::extra_flops_per_token(int64_t) const { return 5.0 * static_cast<double>(inner_ * state_size_); }

}  // namespace fox::mixers
