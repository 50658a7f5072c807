#include "bench/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "kernels/cpu/simd.h"
#include "ops/device.h"
#include "ops/forgetting_attn.h"

namespace fox::bench {
namespace {

constexpr double kLogPruningTolerance = -10;
constexpr double kShortestDecay = 8, kLongestDecay = 65536;  // tokens

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> types{
      {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
  const auto found = types.find(name);
  if (found == types.end()) throw Error("unknown dtype '" + name + "'", "known: float32, float64, bfloat16, float16");
  return found->second;
}

at::Tensor rms_normalised(const at::Tensor& x) { return x * at::rsqrt(x.square().mean(-1, /*keepdim=*/true)); }

/// Inputs of one length, shared by all contenders.
struct Tensors {
  at::Tensor q, k, v, d_o;                // (B, T, H, D)
  at::Tensor log_f_on, log_f_log_spaced;  // (B, T, H)
  at::Tensor mask;                        // (B, H, T, T): the bias of log_f_on, -inf above the diagonal
};

at::Tensor log_spaced_gates(at::IntArrayRef shape) {
  const auto decay = at::exp(at::linspace(std::log(kShortestDecay), std::log(kLongestDecay), shape[2], at::kDouble));
  const auto base = -at::log(at::expm1(1 / decay));  // sigmoid(base) = exp(-1 / decay)
  return at::log_sigmoid(base + at::randn(shape, at::kDouble));
}

Tensors make_tensors(const AttentionOptions& x, int64_t length, at::Device device) {
  at::manual_seed(x.seed);
  const auto type = dtype_of(x.dtype);
  const auto gate_type = type == at::kDouble ? at::kDouble : at::kFloat;
  const auto leaf = [&](const at::Tensor& t) { return t.to(device, type).set_requires_grad(true); };
  const std::vector<int64_t> shape{x.batch, length, x.heads, x.head_dim}, gates{x.batch, length, x.heads};
  Tensors t;
  t.q = leaf(rms_normalised(at::randn(shape)));
  t.k = leaf(rms_normalised(at::randn(shape)));
  t.v = leaf(at::randn(shape));
  t.d_o = at::randn(shape).to(device, type);
  t.log_f_on = at::log_sigmoid(at::randn(gates) + 4).to(device, gate_type).set_requires_grad(true);
  t.log_f_log_spaced = log_spaced_gates(gates).to(device, gate_type).set_requires_grad(true);
  const auto c = t.log_f_on.detach().to(at::kDouble).cumsum(1).transpose(1, 2);
  const auto above = at::ones({length, length}, c.options().dtype(at::kBool)).triu(1);
  t.mask = (c.unsqueeze(-1) - c.unsqueeze(-2)).to(type).masked_fill_(above, -INFINITY);
  return t;
}

/// One way to compute attention: its output, from the shared inputs, and which of them get gradients.
struct Contender {
  AttentionMeasurement line;
  std::function<at::Tensor()> forward;
  std::vector<at::Tensor> inputs;
  at::Tensor d_o;  // in the output's layout
};

std::vector<Contender> make_contenders(const AttentionOptions& x, int64_t length, const Tensors& t) {
  const auto line = [&](const char* op, const char* gates, bool pruned, const std::string& kernel) {
    return AttentionMeasurement{.op = op,
                                .gates = gates,
                                .pruned = pruned,
                                .kernel = kernel,
                                .dtype = x.dtype,
                                .B = x.batch,
                                .T = length,
                                .H = x.heads,
                                .D = x.head_dim};
  };
  const auto fox_kernel = t.q.is_cpu() ? kernels::simd_paths().front() : std::string("cuda");
  std::vector<Contender> all;
  const auto add_fox = [&](const char* gates, const std::optional<at::Tensor>& log_f, bool pruned) {
    ops::ForgettingAttnOptions options;
    if (pruned) options.log_pruning_tolerance = kLogPruningTolerance;
    std::vector<at::Tensor> inputs{t.q, t.k, t.v};
    if (log_f) inputs.push_back(*log_f);
    all.push_back({line("forgetting_attn", gates, pruned, fox_kernel),
                   [=] { return ops::forgetting_attn(t.q, t.k, t.v, log_f, options).o_BTHD; }, inputs, t.d_o});
    if (pruned) {
      all.back().line.kept = ops::forgetting_attn_kept_share(t.q, t.k, *log_f, options).mean().item<double>();
    }
  };
  const auto add_sdpa = [&](const char* op, const char* gates, const std::optional<at::Tensor>& mask) {
    all.push_back({line(op, gates, false, "torch"),
                   [=] {
                     return at::scaled_dot_product_attention(t.q.transpose(1, 2), t.k.transpose(1, 2),
                                                             t.v.transpose(1, 2), mask, 0.0, !mask.has_value());
                   },
                   {t.q, t.k, t.v},
                   t.d_o.transpose(1, 2)});
  };
  add_sdpa("sdpa", "off", std::nullopt);
  add_sdpa("sdpa_float_mask", "on", t.mask);
  add_fox("off", std::nullopt, false);
  add_fox("on", t.log_f_on, false);
  add_fox("log_spaced", t.log_f_log_spaced, false);
  if (x.prune) add_fox("log_spaced", t.log_f_log_spaced, true);
  return all;
}

/// Milliseconds that `work` keeps the device busy.
double time_ms(at::Device device, const std::function<void()>& work) {
  const auto wait = [&] {
    if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  };
  wait();
  const auto start = std::chrono::steady_clock::now();
  work();
  wait();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

/// Forward alone, then with a graph forward and backward.
void take_turn(const Contender& c, at::Device device, std::map<std::string, std::vector<double>>& times) {
  {
    at::NoGradGuard no_grad;
    times["forward"].push_back(time_ms(device, [&] { c.forward(); }));
  }
  at::Tensor o;
  const double forward = time_ms(device, [&] { o = c.forward(); });
  const double backward = time_ms(device, [&] { torch::autograd::grad({o}, c.inputs, {c.d_o}); });
  times["backward"].push_back(backward);
  times["forward_backward"].push_back(forward + backward);
}

double quantile(std::vector<double> x, double q) {
  std::sort(x.begin(), x.end());
  const double at = q * static_cast<double>(x.size() - 1);
  const auto low = static_cast<size_t>(at), high = std::min(low + 1, x.size() - 1);
  return x[low] + (at - static_cast<double>(low)) * (x[high] - x[low]);
}

}  // namespace

void bench_attention(const AttentionOptions& x, const std::function<void(const AttentionMeasurement&)>& report) {
  if (x.repetitions < 1) throw Error(fmt::format("repetitions is {}", x.repetitions), "at least 1");
  const auto device = ops::open_device(x.device);
  if (x.threads > 0) at::set_num_threads(static_cast<int>(x.threads));
  for (const int64_t length : x.lengths) {
    if (length < 1) throw Error(fmt::format("length {}", length), "lengths are at least 1");
    const auto contenders = make_contenders(x, length, make_tensors(x, length, device));
    std::vector<std::map<std::string, std::vector<double>>> times(contenders.size());
    for (int64_t turn = 0; turn <= x.repetitions; ++turn) {
      for (size_t i = 0; i < contenders.size(); ++i) {
        std::map<std::string, std::vector<double>> warming_up;
        take_turn(contenders[i], device, turn == 0 ? warming_up : times[i]);
      }
    }
    const double forward_flops = 2.0 * static_cast<double>(x.batch * x.heads * length * length * x.head_dim);
    const std::map<std::string, double> flops{
        {"forward", forward_flops}, {"backward", 2.5 * forward_flops}, {"forward_backward", 3.5 * forward_flops}};
    for (const char* direction : {"forward", "backward", "forward_backward"}) {
      for (size_t i = 0; i < contenders.size(); ++i) {
        auto line = contenders[i].line;
        const auto& ms = times[i].at(direction);
        line.direction = direction;
        line.ms = quantile(ms, 0.5);
        line.ms_spread = quantile(ms, 0.75) - quantile(ms, 0.25);
        line.tflops = flops.at(direction) / line.ms / 1e9;
        line.ratio = quantile(times[0].at(direction), 0.5) / line.ms;  // the first contender is sdpa
        report(line);
      }
    }
  }
}

std::string to_json(const AttentionMeasurement& m) {
  return nlohmann::ordered_json{{"op", m.op},         {"direction", m.direction},
                                {"gates", m.gates},   {"pruned", m.pruned},
                                {"kernel", m.kernel}, {"dtype", m.dtype},
                                {"B", m.B},           {"T", m.T},
                                {"H", m.H},           {"D", m.D},
                                {"ms", m.ms},         {"ms_spread", m.ms_spread},
                                {"tflops", m.tflops}, {"ratio", m.ratio},
                                {"kept", m.kept}}
      .dump();
}

std::string table_head() {
  return fmt::format("{:<16} {:<17} {:<11} {:<6} {:>6} {:>9} {:>8} {:>8} {:>7} {:>6}", "op", "direction", "gates",
                     "pruned", "T", "ms", "spread", "TFLOP/s", "ratio", "kept");
}

std::string table_row(const AttentionMeasurement& m) {
  return fmt::format("{:<16} {:<17} {:<11} {:<6} {:>6} {:>9.3f} {:>8.3f} {:>8.3f} {:>6.2f}x {:>5.1f}%", m.op,
                     m.direction, m.gates, m.pruned ? "yes" : "no", m.T, m.ms, m.ms_spread, m.tflops, m.ratio,
                     100 * m.kept);
}

}  // namespace fox::bench
