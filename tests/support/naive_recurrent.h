#pragma once

#include <ATen/ATen.h>

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "support/naive_layers.h"

// The recurrent mixers of the executable specification (tests/spec/reference.py), token by token.
namespace fox::naive {

/// Depthwise causal convolution: x (B, T, C), weight (C, 1, K).
inline at::Tensor causal_conv(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias = {}) {
  const auto padded = at::constant_pad_nd(x.transpose(1, 2), {weight.size(2) - 1, 0});
  const auto b = bias.defined() ? std::optional(bias) : std::nullopt;
  return at::conv1d(padded, weight, b, 1, at::IntArrayRef{0}, 1, x.size(2)).transpose(1, 2);
}

inline at::Tensor hgrn2_mixer(const Config& c, const Weights& w, const std::string& p, const at::Tensor& x,
                              const at::Tensor& lower_bound) {
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2), K = c["expand_ratio"], H = C / K;
  const auto linear = [&](const std::string& name) { return at::linear(x, w.at(p + name + ".weight")); };
  const auto heads = [&](const at::Tensor& y) { return y.view({B, T, H, K}); };
  const auto q = heads(at::silu(linear("q_proj"))), v = heads(linear("i_proj"));
  const auto f = at::sigmoid(linear("f_proj"));
  const auto g = heads(lower_bound.defined() ? lower_bound + (1 - lower_bound) * f : f);
  auto S = at::zeros({B, H, K, K}, x.options());
  std::vector<at::Tensor> out;
  for (int64_t t = 0; t < T; ++t) {
    const auto gt = g.select(1, t);
    S = gt.unsqueeze(-1) * S + at::einsum("bhk,bhv->bhkv", {1 - gt, v.select(1, t)});
    out.push_back(at::einsum("bhkv,bhk->bhv", {S, q.select(1, t) / std::sqrt(static_cast<double>(K))}));
  }
  const auto o = rms_norm(at::stack(out, 1).flatten(2), w.at(p + "g_norm.weight"), c.value("norm_eps", 1e-6));
  return at::linear(o, w.at(p + "o_proj.weight"));
}

inline at::Tensor delta_net_mixer(const Config& c, const Weights& w, const std::string& p, const at::Tensor& x) {
  const int64_t B = x.size(0), T = x.size(1), C = x.size(2), H = c["num_heads"], D = C / H;
  const auto project = [&](const std::string& n) {
    return at::silu(causal_conv(at::linear(x, w.at(p + n + "_proj.weight")), w.at(p + n + "_conv1d.weight")))
        .view({B, T, H, D});
  };
  const auto unit = [](const at::Tensor& y) { return y * at::rsqrt(y.square().sum(-1, true) + 1e-6); };
  const auto q = unit(project("q")), k = unit(project("k")), v = project("v");
  const auto beta = at::sigmoid(at::linear(x, w.at(p + "b_proj.weight")));
  auto S = at::zeros({B, H, D, D}, x.options());
  std::vector<at::Tensor> out;
  for (int64_t t = 0; t < T; ++t) {
    const auto kt = k.select(1, t);
    const auto u = (v.select(1, t) - at::einsum("bhkv,bhk->bhv", {S, kt})) * beta.select(1, t).unsqueeze(-1);
    S = S + at::einsum("bhk,bhv->bhkv", {kt, u});
    out.push_back(at::einsum("bhkv,bhk->bhv", {S, q.select(1, t) / std::sqrt(static_cast<double>(D))}));
  }
  const auto o = rms_norm(at::stack(out, 1), w.at(p + "o_norm.weight"), c.value("norm_eps", 1e-6));
  return at::linear(o.flatten(2), w.at(p + "o_proj.weight"));
}

inline at::Tensor mamba2_mixer(const Config& c, const Weights& w, const std::string& p, const at::Tensor& x) {
  const int64_t B = x.size(0), T = x.size(1), H = c["num_heads"], P = c["head_dim"], N = c["state_size"], I = H * P;
  const auto all = at::linear(x, w.at(p + "in_proj.weight")).split_with_sizes({I, I + 2 * N, H}, -1);
  const auto xbc = at::silu(causal_conv(all[1], w.at(p + "conv1d.weight"), w.at(p + "conv1d.bias")));
  const auto parts = xbc.split_with_sizes({I, N, N}, -1);
  const auto u = parts[0].reshape({B, T, H, P});
  const auto dt = at::softplus(all[2] + w.at(p + "dt_bias"));
  const auto A = -w.at(p + "A_log").exp();
  auto h = at::zeros({B, H, P, N}, x.options());
  std::vector<at::Tensor> out;
  for (int64_t t = 0; t < T; ++t) {
    const auto dtt = dt.select(1, t), ut = u.select(1, t);
    h = (dtt * A).exp().unsqueeze(-1).unsqueeze(-1) * h +
        at::einsum("bhp,bn->bhpn", {dtt.unsqueeze(-1) * ut, parts[1].select(1, t)});
    out.push_back(at::einsum("bhpn,bn->bhp", {h, parts[2].select(1, t)}) + w.at(p + "D").unsqueeze(-1) * ut);
  }
  const auto y = at::stack(out, 1).flatten(2) * at::silu(all[0]);
  return at::linear(rms_norm(y, w.at(p + "norm.weight"), c.value("layer_norm_epsilon", 1e-5)),
                    w.at(p + "out_proj.weight"));
}

inline at::Tensor mamba_mixer(const Config& c, const Weights& w, const std::string& p, const at::Tensor& x) {
  const int64_t T = x.size(1), C = x.size(2), I = c.value("expand", 2) * C, N = c.value("state_size", 16);
  const int64_t R = w.at(p + "dt_proj.weight").size(1);
  const auto halves = at::linear(x, w.at(p + "in_proj.weight")).chunk(2, -1);
  const auto u = at::silu(causal_conv(halves[0], w.at(p + "conv1d.weight"), w.at(p + "conv1d.bias")));
  const auto parts = at::linear(u, w.at(p + "x_proj.weight")).split_with_sizes({R, N, N}, -1);
  const auto dt = at::softplus(at::linear(parts[0], w.at(p + "dt_proj.weight"), w.at(p + "dt_proj.bias")));
  const auto A = -w.at(p + "A_log").exp();
  auto h = at::zeros({x.size(0), I, N}, x.options());
  std::vector<at::Tensor> out;
  for (int64_t t = 0; t < T; ++t) {
    const auto dtt = dt.select(1, t), ut = u.select(1, t);
    h = (dtt.unsqueeze(-1) * A).exp() * h + (dtt * ut).unsqueeze(-1) * parts[1].select(1, t).unsqueeze(1);
    out.push_back((h * parts[2].select(1, t).unsqueeze(1)).sum(-1) + w.at(p + "D") * ut);
  }
  return at::linear(at::stack(out, 1) * at::silu(halves[1]), w.at(p + "out_proj.weight"));
}

}  // namespace fox::naive
