#include "mixers/mamba.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>

#include "mixers/initial_values.h"
#include "mixers/recurrent_slot.h"
#include "ops/dtypes.h"
#include "ops/mamba.h"
#include "ops/swiglu.h"
#include "ops/time_step.h"

namespace fox::mixers {
namespace {

// A chunk's states, 16 I N numbers, should stay in a cache near the core.
constexpr int64_t kChunk = 16;

}  // namespace

Mamba::Mamba(const ModelConfig& config)
    : config_(config),
      inner_(config.inner_width()),
      state_size_(config.state_size),
      rank_(config.time_rank()),
      in_proj_(config.hidden_size, 2 * inner_),
      x_proj_(inner_, rank_ + 2 * state_size_),
      dt_proj_(rank_, inner_, /*with_bias=*/true),
      out_proj_(inner_, config.hidden_size),
      conv_(inner_, config.conv_kernel, config.use_conv_bias),
      a_log_IN_(at::empty({inner_, state_size_}, at::kFloat)),
      d_I_(at::empty({inner_}, at::kFloat)) {}

at::Tensor Mamba::forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) {
  auto* memory = static_cast<RecurrentSlot*>(slot);
  const auto halves = in_proj_.forward(x_BTC).chunk(2, -1);
  const auto x_BTI = conv_.forward(halves[0], sequence, memory ? &memory->conv[0] : nullptr);
  const auto parts = x_proj_.forward(x_BTI).split_with_sizes({rank_, state_size_, state_size_}, -1);
  const auto logits = at::linear(parts[0], ops::cast(dt_proj_.weight, x_BTC.scalar_type()));
  const auto dt_BTI = ops::time_step(logits, dt_proj_.bias);
  const auto a_IN = -ops::cast(a_log_IN_, dt_BTI.scalar_type()).exp();
  const auto y_BTI = run_recurrence(sequence, memory, {x_BTI, dt_BTI, a_IN, parts[1], parts[2], d_I_},
                                    [](const auto& in, ops::RecurrenceOptions options) {
                                      options.chunk_size = kChunk;
                                      return ops::mamba(in[0], in[1], in[2], in[3], in[4], in[5], options);
                                    });
  return out_proj_.forward(ops::swiglu(halves[1], y_BTI));
}

std::unique_ptr<nn::CacheSlot> Mamba::make_slot() const {
  auto slot = std::make_unique<RecurrentSlot>();
  slot->conv.resize(1);
  return slot;
}

void Mamba::collect(const std::string& prefix, nn::Parameters& out) {
  out.push_back({prefix + "A_log", a_log_IN_, /*decay=*/false});
  out.push_back({prefix + "D", d_I_, /*decay=*/false});
  in_proj_.collect(prefix + "in_proj.", out);
  conv_.collect(prefix + "conv1d.", out);
  x_proj_.collect(prefix + "x_proj.", out);
  dt_proj_.collect(prefix + "dt_proj.", out);
  out_proj_.collect(prefix + "out_proj.", out);
}

void Mamba::init() {
  at::NoGradGuard no_grad;
  in_proj_.init_default();
  x_proj_.init_default();
  // Two branches a layer are added to the residual stream.
  const double residual = 1 / std::sqrt(2.0 * static_cast<double>(config_.num_hidden_layers));
  out_proj_.init_default(config_.rescale_prenorm_residual ? residual : 1);
  conv_.init();
  const double bound = config_.time_step_scale / std::sqrt(static_cast<double>(rank_));
  dt_proj_.init_uniform(bound);
  if (config_.time_step_init_scheme == "constant") dt_proj_.weight.fill_(bound);
  init_time_steps(dt_proj_.bias, config_);
  a_log_IN_.copy_(at::arange(1, state_size_ + 1, at::kDouble).log().expand_as(a_log_IN_));
  d_I_.fill_(1);
}

double Mamba::extra_flops_per_token(int64_t) const { return 5.0 * static_cast<double>(inner_ * state_size_); }

}  // namespace fox::mixers
