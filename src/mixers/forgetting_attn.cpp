#include "mixers/forgetting_attn.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "mixers/decay_bias.h"
#include "nn/growing_buffer.h"
#include "nn/linear_together.h"
#include "ops/attn_input.h"
#include "ops/forgetting_attn.h"
#include "ops/forgetting_attn_split.h"
#include "ops/gate.h"
#include "ops/gated_rms_norm.h"
#include "ops/previous_tokens.h"

namespace fox::mixers {
namespace {

constexpr double kQkNormEps = 1e-5;  // published; not the norm_eps of the configuration

// Told a bound of the logits, CUDA's forward pass needs no running maximum. It reads the bound where it lies, on the
// device; the four small kernels that work it out take as long as they save at about so many queries.
constexpr int64_t kQueriesWorthABound = 2048;

/// Keys, values and gates of the tokens seen (the last window of them), and what the token shift still needs.
struct AttnSlot final : nn::CacheSlot {
  nn::GrowingBuffer k, v, log_f;
  at::Tensor last_k_BHD, last_v_BHD;  // before the shift
};

// How keys or values are shifted by one token; not at all where `alpha_logits` is undefined. `last_BHD` is what a slot
// remembers: it holds the token before this chunk and is left with this chunk's last.
ops::AttnInputOptions token_shift_of(const at::Tensor& x_BTHD, const at::Tensor& alpha_logits,
                                     const nn::Sequence& sequence, at::Tensor* last_BHD) {
  ops::AttnInputOptions options;
  if (!alpha_logits.defined()) return options;
  options.shift_logits_BTH = alpha_logits;
  options.cu_seqlens = sequence.cu_seqlens;
  // Padding is counted from the first token of the cache, the operator counts from the first token it is given. Where
  // padding ended before this chunk, the token before the chunk is a real one.
  auto& seq_start = options.seq_start;
  if (sequence.seq_start) seq_start = *sequence.seq_start - sequence.offset;
  if (last_BHD && last_BHD->defined()) {
    options.prev_BHD = *last_BHD;
    if (seq_start) {
      options.prev_BHD = at::where(seq_start->lt(0).view({-1, 1, 1}), *last_BHD, at::zeros_like(*last_BHD));
    }
  }
  if (seq_start) seq_start = seq_start->clamp(0, x_BTHD.size(1));
  if (last_BHD) *last_BHD = x_BTHD.select(1, -1).clone();
  return options;
}

// What becomes of the tokens before attention; where they are chunks of a sequence, each stands at a position of its
// own.
at::Tensor attn_input(const at::Tensor& x_BTHD, const ops::AttnInputOptions& steps, const nn::Sequence& sequence) {
  if (!sequence.shard || !steps.rotary_base) return ops::attn_input(x_BTHD, steps);
  std::vector<at::Tensor> chunks;
  for (int64_t slot = 0; slot < dist::SequenceShard::kChunks; ++slot) {
    const auto rows = [&](const std::optional<at::Tensor>& x) {
      return x ? std::optional(dist::SequenceShard::rows(*x, slot)) : x;
    };
    auto own = steps;
    own.shift_logits_BTH = rows(steps.shift_logits_BTH);
    own.prev_BHD = rows(steps.prev_BHD);
    own.rotary_offset = sequence.shard->chunk(sequence.shard->rank(), slot) * x_BTHD.size(1);
    chunks.push_back(ops::attn_input(*rows(x_BTHD), own));
  }
  return at::cat(chunks);
}

}  // namespace

struct ForgettingAttn::Projected {
  at::Tensor q_BTHD, k_BTHD, v_BTHD;
  at::Tensor k_alpha_BTH, v_alpha_BTH;  // logits of the shift, or undefined
  at::Tensor gate_BTH;                  // logits of the forget gate, or undefined
  at::Tensor output_gate_BTC;           // before its activation, or undefined
};

ForgettingAttn::ForgettingAttn(const ModelConfig& config, int64_t layer)
    : config_(config),
      layer_(layer),
      head_dim_(config.head_dim()),
      q_proj_(config.hidden_size, config.hidden_size),
      k_proj_(config.hidden_size, config.kv_heads() * head_dim_),
      v_proj_(config.hidden_size, config.kv_heads() * head_dim_),
      o_proj_(config.hidden_size, config.hidden_size) {
  const int64_t C = config.hidden_size, H = config.num_heads, Hk = config.kv_heads();
  if (config.use_k_shift) k_shift_proj_.emplace(C, Hk);
  if (config.use_v_shift) v_shift_proj_.emplace(C, Hk);
  if (config.fgate_type == GateType::kFull) fgate_proj_.emplace(C, H, true);
  if (config.fgate_type == GateType::kBiasOnly || config.fgate_type == GateType::kFixed) {
    fgate_bias_ = at::empty({H}, at::kFloat);
  }
  if (config.use_output_gate) ogate_proj_.emplace(C, C);
  if (config.qk_norm) {
    const bool shared = config.qk_norm_share_param_across_head;
    q_norm_.emplace(C, kQkNormEps, H, shared);
    k_norm_.emplace(Hk * head_dim_, kQkNormEps, Hk, shared);
  }
  if (config.use_output_norm) output_norm_.emplace(C, config.norm_eps, H);
}

ForgettingAttn::Projected ForgettingAttn::project(const at::Tensor& x_BTC) const {
  std::vector<at::Tensor> weights{q_proj_.weight, k_proj_.weight, v_proj_.weight};
  Projected projected;
  std::vector<at::Tensor*> results{&projected.q_BTHD, &projected.k_BTHD, &projected.v_BTHD};
  const auto add = [&](const std::optional<nn::Linear>& linear, at::Tensor& result) {
    if (!linear) return;
    weights.push_back(linear->weight);
    results.push_back(&result);
  };
  add(ogate_proj_, projected.output_gate_BTC);
  add(k_shift_proj_, projected.k_alpha_BTH);
  add(v_shift_proj_, projected.v_alpha_BTH);
  add(fgate_proj_, projected.gate_BTH);
  const auto products = nn::linear_together(x_BTC, weights, projections_);
  for (size_t i = 0; i < products.size(); ++i) *results[i] = products[i];
  projected.q_BTHD = projected.q_BTHD.unflatten(-1, {config_.num_heads, head_dim_});
  projected.k_BTHD = projected.k_BTHD.unflatten(-1, {config_.kv_heads(), head_dim_});
  projected.v_BTHD = projected.v_BTHD.unflatten(-1, {config_.kv_heads(), head_dim_});
  return projected;
}

std::optional<at::Tensor> ForgettingAttn::log_gate(const Projected& projected) const {
  if (fgate_proj_) return ops::log_sigmoid_gate(projected.gate_BTH, fgate_proj_->bias);
  if (!fgate_bias_.defined()) return std::nullopt;
  const auto& q = projected.q_BTHD;
  return ops::log_sigmoid_gate(fgate_bias_, std::nullopt).expand({q.size(0), q.size(1), config_.num_heads});
}

// |q·k| <= |q| |k| and RMSNorm leaves |q| <= sqrt(D) max|g|, which rotation keeps: no pass over the data is needed.
at::Tensor ForgettingAttn::logit_bound() const {
  at::NoGradGuard no_grad;
  const auto largest = [&](const nn::RmsNorm& norm) {
    const auto per_group = at::linalg_vector_norm(norm.weight.view({-1, head_dim_}), INFINITY, at::IntArrayRef({1}));
    const int64_t heads_a_group = config_.num_heads / norm.num_groups;
    return per_group.to(at::kFloat).expand({norm.num_groups}).unsqueeze(1).expand({-1, heads_a_group}).flatten();
  };
  // bfloat16 rounds q and k after the norm by up to 2^-9 each.
  constexpr double kRounding = 1.0 + 1.0 / 128;
  return largest(*q_norm_) * largest(*k_norm_) * (std::sqrt(static_cast<double>(head_dim_)) * kRounding);
}

at::Tensor ForgettingAttn::attend(const Projected& projected, const nn::Sequence& sequence, nn::CacheSlot* slot) const {
  auto* memory = static_cast<AttnSlot*>(slot);
  const auto norm_and_rotate = [&](ops::AttnInputOptions& steps, const std::optional<nn::RmsNorm>& norm) {
    if (norm) steps.norm_weight = norm->weight, steps.norm_eps = norm->eps;
    if (config_.use_rope) steps.rotary_base = config_.rope_base, steps.rotary_offset = sequence.offset;
  };
  const auto shift = [&](const at::Tensor& x_BTHD, const at::Tensor& alpha_logits, at::Tensor AttnSlot::*last_BHD) {
    return token_shift_of(x_BTHD, alpha_logits, sequence, memory ? &(memory->*last_BHD) : nullptr);
  };
  ops::AttnInputOptions q_steps;
  auto k_steps = shift(projected.k_BTHD, projected.k_alpha_BTH, &AttnSlot::last_k_BHD);
  auto v_steps = shift(projected.v_BTHD, projected.v_alpha_BTH, &AttnSlot::last_v_BHD);
  if (sequence.shard && (k_steps.shift_logits_BTH || v_steps.shift_logits_BTH)) {
    // One message for both.
    const auto last_BHD = at::stack({projected.k_BTHD.select(1, -1), projected.v_BTHD.select(1, -1)}, 1);
    const auto before = ops::previous_tokens(last_BHD, sequence.shard).unbind(1);
    if (k_steps.shift_logits_BTH) k_steps.prev_BHD = before[0];
    if (v_steps.shift_logits_BTH) v_steps.prev_BHD = before[1];
  }
  norm_and_rotate(q_steps, q_norm_);
  norm_and_rotate(k_steps, k_norm_);
  const auto q_BTHD = attn_input(projected.q_BTHD, q_steps, sequence);
  auto k_BTHD = attn_input(projected.k_BTHD, k_steps, sequence);
  auto v_BTHD = attn_input(projected.v_BTHD, v_steps, sequence);
  auto log_f_BTH = log_gate(projected);
  if (sequence.probe) sequence.probe->on_attention(layer_, q_BTHD, k_BTHD, log_f_BTH.value_or(at::Tensor()));

  ops::ForgettingAttnOptions options;
  options.window = config_.window_size;
  options.deterministic = sequence.deterministic;
  options.seq_start = sequence.seq_start;
  options.cu_seqlens = sequence.cu_seqlens;
  options.log_pruning_tolerance = config_.log_pruning_tolerance;
  const bool is_long_on_cuda = q_BTHD.is_cuda() && q_BTHD.size(1) >= kQueriesWorthABound;
  if (q_norm_ && (options.log_pruning_tolerance || is_long_on_cuda)) options.logit_bound = logit_bound();
  if (sequence.shard) {
    return ops::forgetting_attn_split(q_BTHD, k_BTHD, v_BTHD, log_f_BTH, options, sequence.shard);
  }
  if (!memory) return ops::forgetting_attn(q_BTHD, k_BTHD, v_BTHD, log_f_BTH, options).o_BTHD;

  k_BTHD = memory->k.append(k_BTHD);
  v_BTHD = memory->v.append(v_BTHD);
  if (log_f_BTH) log_f_BTH = memory->log_f.append(*log_f_BTH);
  const int64_t dropped = sequence.offset + q_BTHD.size(1) - k_BTHD.size(1);
  if (options.seq_start) options.seq_start = (*options.seq_start - dropped).clamp(0, k_BTHD.size(1));
  auto o_BTHD = ops::forgetting_attn(q_BTHD, k_BTHD, v_BTHD, log_f_BTH, options).o_BTHD;
  if (config_.window_size) {
    for (auto* buffer : {&memory->k, &memory->v, &memory->log_f}) buffer->keep_last(*config_.window_size - 1);
  }
  return o_BTHD;
}

at::Tensor ForgettingAttn::gated(const at::Tensor& o_BTC, const at::Tensor& gate_BTC) const {
  const bool silu = config_.ogate_act == "silu";
  if (output_norm_ && gate_BTC.defined()) {
    const auto& norm = *output_norm_;
    return ops::gated_rms_norm(o_BTC, gate_BTC, norm.weight, norm.eps, norm.num_groups, silu);
  }
  if (output_norm_) return output_norm_->forward(o_BTC);
  return gate_BTC.defined() ? o_BTC * (silu ? at::silu(gate_BTC) : at::sigmoid(gate_BTC)) : o_BTC;
}

at::Tensor ForgettingAttn::forward(const at::Tensor& x_BTC, const nn::Sequence& sequence, nn::CacheSlot* slot) {
  const auto projected = project(x_BTC);
  const auto o_BTC = attend(projected, sequence, slot).flatten(2);
  return o_proj_.forward(gated(o_BTC, projected.output_gate_BTC));
}

std::unique_ptr<nn::CacheSlot> ForgettingAttn::make_slot() const { return std::make_unique<AttnSlot>(); }

void ForgettingAttn::collect(const std::string& prefix, nn::Parameters& out) {
  // A shifted projection is published as a pair.
  const auto collect_shifted = [&](const std::string& name, nn::Linear& linear, std::optional<nn::Linear>& shift) {
    linear.collect(prefix + name + (shift ? ".linear." : "."), out);
    if (shift) shift->collect(prefix + name + ".shift_proj.", out);
  };
  q_proj_.collect(prefix + "q_proj.", out);
  collect_shifted("k_proj", k_proj_, k_shift_proj_);
  collect_shifted("v_proj", v_proj_, v_shift_proj_);
  o_proj_.collect(prefix + "o_proj.", out);
  if (fgate_proj_) fgate_proj_->collect(prefix + "fgate_proj.", out);
  if (fgate_bias_.defined()) {
    out.push_back({prefix + "fgate_bias", fgate_bias_, /*decay=*/false,
                   /*trainable=*/config_.fgate_type == GateType::kBiasOnly});
  }
  if (ogate_proj_) ogate_proj_->collect(prefix + "ogate_proj.", out);
  if (q_norm_) q_norm_->collect(prefix + "q_norm.", out);
  if (k_norm_) k_norm_->collect(prefix + "k_norm.", out);
  if (output_norm_) output_norm_->collect(prefix + "output_norm.", out);
}

void ForgettingAttn::init() {
  if (config_.kind() == "samba") return init_in_samba();
  const double std = config_.initializer_range;
  for (auto* linear : {&q_proj_, &k_proj_, &v_proj_, &o_proj_}) linear->init(std);
  for (auto* linear : {&k_shift_proj_, &v_shift_proj_, &fgate_proj_, &ogate_proj_}) {
    if (*linear) (*linear)->init(std);
  }
  for (auto* norm : {&q_norm_, &k_norm_, &output_norm_}) {
    if (*norm) (*norm)->init();
  }
  at::NoGradGuard no_grad;
  auto bias_H = fgate_proj_ ? fgate_proj_->bias : fgate_bias_;
  if (!bias_H.defined()) return;
  bias_H.zero_();
  if (config_.fgate_bias_init) {
    bias_H.copy_(decay_bias(config_.num_heads, *config_.decay_time_min, *config_.decay_time_max));
  }
}

// Samba starts its attention layers as it starts all others.
void ForgettingAttn::init_in_samba() {
  for (auto* linear : {&q_proj_, &k_proj_, &v_proj_}) linear->init_default();
  const double residual = 1 / std::sqrt(2.0 * static_cast<double>(config_.num_hidden_layers));
  o_proj_.init_default(config_.rescale_prenorm_residual ? residual : 1);
}

double ForgettingAttn::extra_flops_per_token(int64_t context) const {
  const double length = static_cast<double>(context);
  const double window = std::min(length, static_cast<double>(config_.window_size.value_or(context)));
  // Logits and weighted sum: 4 FLOPs a visible key and channel; a row sees min(i + 1, window) keys, (2L - w) w / 2L on
  // average, which is L / 2 without a window.
  const double visible = window * (2 * length - window) / (2 * length);
  return 4 * visible * static_cast<double>(config_.hidden_size);
}

}  // namespace fox::mixers
