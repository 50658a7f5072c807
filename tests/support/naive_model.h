#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>

#include "support/naive_layers.h"
#include "support/naive_recurrent.h"

// The executable specification (tests/spec/reference.py) once more, in ATen: whole T x T matrices, a loop over time for
// recurrences, no operator of ours. What it reaches in float32 is what float32 can be expected to reach.
namespace fox::naive {

inline at::Tensor group_rms_norm(const at::Tensor& x, const at::Tensor& weight, int64_t groups, double eps) {
  const auto y = x.unflatten(-1, {groups, -1});
  return (y * at::rsqrt(y.square().mean(-1, true) + eps)).flatten(-2) * weight;
}

inline at::Tensor rope(const at::Tensor& x_BTHD, double base) {
  const int64_t T = x_BTHD.size(1), D = x_BTHD.size(3);
  const auto frequency = at::pow(base, -at::arange(0, D, 2, at::kDouble) / static_cast<double>(D));
  const auto angle = at::outer(at::arange(T, at::kDouble), frequency);
  const auto cos = angle.cos().to(x_BTHD.scalar_type()).view({1, T, 1, D / 2});
  const auto sin = angle.sin().to(x_BTHD.scalar_type()).view({1, T, 1, D / 2});
  const auto half = x_BTHD.chunk(2, -1);
  return at::cat({half[0] * cos - half[1] * sin, half[0] * sin + half[1] * cos}, -1);
}

inline at::Tensor attention(const at::Tensor& q, const at::Tensor& k_in, const at::Tensor& v_in,
                            const at::Tensor& log_f, const Config& window) {
  const int64_t T = q.size(1), repeat = q.size(2) / k_in.size(2);
  const auto k = k_in.repeat_interleave(repeat, 2), v = v_in.repeat_interleave(repeat, 2);
  auto s = at::einsum("bihd,bjhd->bhij", {q, k}) / std::sqrt(static_cast<double>(q.size(3)));
  const auto i = at::arange(T).unsqueeze(1), j = at::arange(T).unsqueeze(0);
  auto keep = j <= i;
  if (window.is_number()) keep = keep & (j > i - window.get<int64_t>());
  if (log_f.defined()) {
    const auto c = log_f.cumsum(1).transpose(1, 2);
    s = s + c.unsqueeze(3) - c.unsqueeze(2);
  }
  return at::einsum("bhij,bjhd->bihd", {s.masked_fill(~keep, -INFINITY).softmax(-1), v});
}

inline at::Tensor token_shift(const at::Tensor& x, const at::Tensor& alpha_BTH) {
  const auto alpha = alpha_BTH.unsqueeze(-1);
  const auto before = at::cat({at::zeros_like(x.narrow(1, 0, 1)), x.narrow(1, 0, x.size(1) - 1)}, 1);
  return alpha * before + (1 - alpha) * x;
}

inline at::Tensor fox_mixer(const Config& c, const Weights& w, const std::string& p, const at::Tensor& x) {
  const int64_t H = c["num_heads"];
  const auto on = [&](const char* key) { return c.value(key, false); };
  const auto linear = [&](const std::string& name) { return at::linear(x, w.at(p + name + ".weight")); };
  const auto heads = [&](const at::Tensor& y) { return y.unflatten(-1, {H, -1}); };
  const auto kv = [&](const std::string& name, bool shift) {
    if (!shift) return heads(linear(name));
    return token_shift(heads(linear(name + ".linear")), at::sigmoid(linear(name + ".shift_proj")));
  };
  auto q = heads(linear("q_proj")), k = kv("k_proj", on("use_k_shift")), v = kv("v_proj", on("use_v_shift"));
  if (on("qk_norm")) {
    const auto norm = [&](const at::Tensor& y, const at::Tensor& weight) {
      if (on("qk_norm_share_param_across_head")) return rms_norm(y, weight, 1e-5);
      return heads(group_rms_norm(y.flatten(2), weight, H, 1e-5));
    };
    q = norm(q, w.at(p + "q_norm.weight"));
    k = norm(k, w.at(p + "k_norm.weight"));
  }
  const double base = c.value("rope_base", 500000.0);
  if (on("use_rope")) q = rope(q, base), k = rope(k, base);
  const std::string gate = c.value("fgate_type", "full");
  at::Tensor log_f;
  if (gate == "full") log_f = at::log_sigmoid(linear("fgate_proj") + w.at(p + "fgate_proj.bias"));
  if (gate == "bias_only" || gate == "fixed") {
    log_f = at::log_sigmoid(w.at(p + "fgate_bias")).expand({x.size(0), x.size(1), H});
  }
  auto o = attention(q, k, v, log_f, c.value("window_size", Config())).flatten(2);
  if (on("use_output_norm")) o = group_rms_norm(o, w.at(p + "output_norm.weight"), H, c.value("norm_eps", 1e-6));
  if (on("use_output_gate")) {
    const auto g = linear("ogate_proj");
    o = o * (c.value("ogate_act", "sigmoid") == "silu" ? at::silu(g) : at::sigmoid(g));
  }
  return at::linear(o, w.at(p + "o_proj.weight"));
}

inline at::Tensor softmax_mixer(const Config& c, const Weights& w, const std::string& p, const at::Tensor& x) {
  const int64_t H = c["num_heads"];
  const Config kv_heads = c.value("num_kv_heads", Config());
  const int64_t Hk = kv_heads.is_number() ? kv_heads.get<int64_t>() : H;
  const auto project = [&](const std::string& name, int64_t heads) {
    return at::linear(x, w.at(p + name + ".weight")).unflatten(-1, {heads, -1});
  };
  const double base = c.value("rope_base", 500000.0);
  const auto o = attention(rope(project("q_proj", H), base), rope(project("k_proj", Hk), base), project("v_proj", Hk),
                           {}, c.value("window_size", Config()));
  return at::linear(o.flatten(2), w.at(p + "o_proj.weight"));
}

inline at::Tensor swiglu_mlp(const Weights& w, const std::string& p, const at::Tensor& x) {
  const auto half = at::linear(x, w.at(p + "gate_proj.weight")).chunk(2, -1);
  return at::linear(at::silu(half[0]) * half[1], w.at(p + "down_proj.weight"));
}

inline at::Tensor mixer(const Config& c, const Weights& w, const std::string& p, const at::Tensor& x, int64_t layer) {
  const std::string type = c["model_type"], kind = type.substr(0, type.find('-'));
  if (kind == "transformer") return softmax_mixer(c, w, p, x);
  if (kind == "forgetting_transformer") return fox_mixer(c, w, p, x);
  if (kind == "delta_net") return delta_net_mixer(c, w, p, x);
  if (kind == "mamba2") return mamba2_mixer(c, w, p, x);
  if (kind == "hgrn2") {
    if (!c.value("apply_lower_bound", false) || layer == 0) return hgrn2_mixer(c, w, p, x, {});
    const auto share = w.at("model.lower_bounds").softmax(0);
    return hgrn2_mixer(c, w, p, x, (share.cumsum(0) - share[0])[layer]);
  }
  if (layer % 2 == 0) return mamba_mixer(c, w, p, x);  // samba
  Config attn = c["attn"];
  attn["rope_base"] = c.value("rope_base", 500000.0);
  return softmax_mixer(attn, w, p, x);
}

/// ids (B, T) int64 → logits (B, T, V), in the dtype of the weights.
inline at::Tensor logits(const Config& c, const Weights& w, const at::Tensor& ids) {
  const std::string type = c["model_type"], kind = type.substr(0, type.find('-'));
  const bool mamba2 = kind == "mamba2", backbone = mamba2 || kind == "samba";
  const std::string root = backbone ? "backbone." : "model.", mix = backbone ? "mixer" : "attn";
  const double eps = c.value(mamba2 ? "layer_norm_epsilon" : "norm_eps", backbone ? 1e-5 : 1e-6);
  auto x = w.at(root + "embeddings.weight").index_select(0, ids.flatten()).view({ids.size(0), ids.size(1), -1});
  for (int64_t i = 0; i < c["num_hidden_layers"].get<int64_t>(); ++i) {
    const auto p = fmt::format("{}layers.{}.", root, i);
    const auto h = rms_norm(x, w.at(p + (mamba2 ? "" : mix + "_") + "norm.weight"), eps);
    x = x + mixer(c, w, p + mix + ".", h, i);
    if (!mamba2) x = x + swiglu_mlp(w, p + "mlp.", rms_norm(x, w.at(p + "mlp_norm.weight"), eps));
  }
  x = rms_norm(x, w.at(root + (backbone ? "norm_f" : "norm") + ".weight"), eps);
  return at::linear(x, w.at("lm_head.weight"));
}

/// Cross-entropy in nats a token (B, T).
inline at::Tensor loss_per_token(const Config& c, const Weights& w, const at::Tensor& ids, const at::Tensor& labels) {
  const auto log_p = logits(c, w, ids).log_softmax(-1);
  return -log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1);
}

}  // namespace fox::naive
