#include "mixers/delta_net.h"

#include <ATen/ATen.h>

#include <cmath>

#include "mixers/initial_values.h"
#include "mixers/recurrent_slot.h"
#include "nn/linear_together.h"
#include "ops/delta_net.h"
#include "ops/dtypes.h"
#include "ops/rms_norm.h"

namespace fox::mixers {
namespace {

constexpr double kUnitEps = 1e-6;  // published; keeps a vector of 0 from being divided by 0

// x / √(Σ x² + eps) of each head: an RMSNorm whose weight is 1/√D.
at::Tensor unit(const at::Tensor& x_BTC, int64_t heads) {
  const int64_t width = x_BTC.size(-1) / heads;
  const auto size = static_cast<double>(width);
  const auto weight_D =
      at::full({width}, 1 / std::sqrt(size), x_BTC.options().dtype(ops::compute_type(x_BTC.scalar_type())));
  return ops::rms_norm(x_BTC, weight_D, kUnitEps / size, heads);
}

}  // namespace

DeltaNet::DeltaNet(const ModelConfig& config)
    : config_(config),
      q_proj_(config.hidden_size, config.hidden_size),
      k_proj_(config.hidden_size, config.hidden_size),
      v_proj_(config.hidden_size, config.hidden_size),
      b_proj_(config.hidden_size, config.num_heads),
      o_proj_(config.hidden_size, config.hidden_size),
      q_conv_(config.hidden_size, config.conv_size, /*with_bias=*/false),
      k_conv_(config.hidden_size, config.conv_size, /*with_bias=*/false),
      v_conv_(config.hidden_size, config.conv_size, /*with_bias=*/false),
      o_norm_(config.hidden_size, config.norm_eps, config.num_heads, /*shared=*/true) {}

at::Tensor DeltaNet::forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) {
  auto* memory = static_cast<RecurrentSlot*>(slot);
  const auto projected =
      nn::linear_together(x_BTC, {q_proj_.weight, k_proj_.weight, v_proj_.weight, b_proj_.weight}, projections_);
  const int64_t H = config_.num_heads;
  const auto convolved = [&](const nn::ShortConv& conv, size_t i) {
    return conv.forward(projected[i], sequence, memory ? &memory->conv[i] : nullptr);
  };
  const auto heads = [&](const at::Tensor& y_BTC) { return y_BTC.unflatten(-1, {H, -1}); };
  const auto q = heads(unit(convolved(q_conv_, 0), H)), k = heads(unit(convolved(k_conv_, 1), H));
  const auto v = heads(convolved(v_conv_, 2));
  const auto beta = at::sigmoid(ops::cast(projected[3], ops::compute_type(x_BTC.scalar_type())));
  const auto o_BTHV = run_recurrence(sequence, memory, {q, k, v, beta}, [](const auto& in, const auto& options) {
    return ops::delta_net(in[0], in[1], in[2], in[3], options);
  });
  return o_proj_.forward(o_norm_.forward(o_BTHV.flatten(2)));
}

std::unique_ptr<nn::CacheSlot> DeltaNet::make_slot() const {
  auto slot = std::make_unique<RecurrentSlot>();
  slot->conv.resize(3);
  return slot;
}

void DeltaNet::collect(const std::string& prefix, nn::Parameters& out) {
  q_proj_.collect(prefix + "q_proj.", out);
  k_proj_.collect(prefix + "k_proj.", out);
  v_proj_.collect(prefix + "v_proj.", out);
  q_conv_.collect(prefix + "q_conv1d.", out);
  k_conv_.collect(prefix + "k_conv1d.", out);
  v_conv_.collect(prefix + "v_conv1d.", out);
  b_proj_.collect(prefix + "b_proj.", out);
  o_norm_.collect(prefix + "o_norm.", out);
  o_proj_.collect(prefix + "o_proj.", out);
}

void DeltaNet::init() {
  for (auto* linear : {&q_proj_, &k_proj_, &v_proj_, &b_proj_, &o_proj_}) init_xavier(*linear);
  for (auto* conv : {&q_conv_, &k_conv_, &v_conv_}) conv->init();
  o_norm_.init();
}

double DeltaNet::extra_flops_per_token(int64_t) const {
  return 6.0 * static_cast<double>(config_.hidden_size * config_.head_dim());
}

}  // namespace fox::mixers
