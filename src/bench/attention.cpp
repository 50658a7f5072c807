#include "bench/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "bench/inputs.h"
#include "bench/timing.h"
#include "kernels/cpu/simd.h"
#include "ops/device.h"
#include "ops/forgetting_attn.h"

namespace fox::bench {
namespace {

/// One length's problem, with what the options leave to the device filled in.
struct Problem {
  at::Device device;
  std::string dtype;
  int64_t B, T, H, D;
};

Problem make_problem(const AttentionOptions& x, at::Device device, int64_t length) {
  if (length < 1) throw Error(fmt::format("length {}", length), "lengths are at least 1");
  constexpr int64_t kTokens = 32768, kChannels = 1536;
  Problem p{device, x.dtype, x.batch, length, x.heads, x.head_dim};
  if (p.dtype.empty()) p.dtype = device.is_cpu() ? "float32" : "bfloat16";
  if (p.B == 0) p.B = device.is_cpu() ? 1 : std::max<int64_t>(1, kTokens / length);
  if (p.H == 0) p.H = device.is_cpu() ? 4 : std::max<int64_t>(1, kChannels / p.D);
  return p;
}

/// Inputs of one length, shared by all contenders.
struct AttentionTensors {
  at::Tensor q, k, v, d_o;                // (B, T, H, D)
  at::Tensor log_f_on, log_f_log_spaced;  // (B, T, H)
  at::Tensor logit_bound;                 // (H,): what q and k, RMS-normalised as by QK-norm of unit scale, can reach
  at::Tensor mask;  // (B, H, T, T): the bias of log_f_on, -inf above the diagonal; on the CPU only
};

AttentionTensors make_tensors(const Problem& x, uint64_t seed) {
  at::manual_seed(seed);
  const auto type = dtype_of(x.dtype);
  const auto gate_type = type == at::kDouble ? at::kDouble : at::kFloat;
  const auto on_device = at::TensorOptions(x.device);
  const auto leaf = [&](const at::Tensor& t, at::ScalarType as) { return t.to(as).set_requires_grad(true); };
  const std::vector<int64_t> shape{x.B, x.T, x.H, x.D}, gates{x.B, x.T, x.H};
  AttentionTensors t;
  t.q = leaf(rms_normalised(at::randn(shape, on_device)), type);
  t.k = leaf(rms_normalised(at::randn(shape, on_device)), type);
  t.v = leaf(at::randn(shape, on_device), type);
  t.d_o = at::randn(shape, on_device).to(type);
  t.log_f_on = leaf(at::log_sigmoid(at::randn(gates, on_device) + 4), gate_type);
  t.log_f_log_spaced = leaf(log_spaced_gates(gates, x.device), gate_type);
  t.logit_bound = bench::logit_bound(x.H, x.D, x.device);
  if (!x.device.is_cpu()) return t;  // T² values a head: at the lengths of a GPU they do not fit
  const auto c = t.log_f_on.detach().to(at::kDouble).cumsum(1).transpose(1, 2);
  const auto above = at::ones({x.T, x.T}, c.options().dtype(at::kBool)).triu(1);
  t.mask = (c.unsqueeze(-1) - c.unsqueeze(-2)).to(type).masked_fill_(above, -INFINITY);
  return t;
}

/// One way to compute attention: its output, from the shared inputs, and which of them get gradients.
struct AttentionContender {
  AttentionMeasurement line;
  std::function<at::Tensor()> forward;
  std::vector<at::Tensor> inputs;
  at::Tensor d_o;                                 // in the output's layout
  int64_t forward_calls = 1, backward_calls = 1;  // a turn
};

AttentionMeasurement blank_line(const Problem& x, const char* op, const char* gates, bool pruned,
                                const std::string& kernel) {
  return {.op = op,
          .gates = gates,
          .pruned = pruned,
          .kernel = kernel,
          .dtype = x.dtype,
          .B = x.B,
          .T = x.T,
          .H = x.H,
          .D = x.D};
}

AttentionContender sdpa(const Problem& x, const AttentionTensors& t, const char* op, const char* gates,
                        const std::string& kernel, const std::optional<at::Tensor>& mask = {}) {
  return {blank_line(x, op, gates, false, kernel),
          [=] {
            const SdpKernel selected(kernel);
            return at::scaled_dot_product_attention(t.q.transpose(1, 2), t.k.transpose(1, 2), t.v.transpose(1, 2), mask,
                                                    0.0, !mask.has_value());
          },
          {t.q, t.k, t.v},
          t.d_o.transpose(1, 2)};
}

AttentionContender fox(const Problem& x, const AttentionTensors& t, const char* gates,
                       const std::optional<at::Tensor>& log_f, bool pruned) {
  ops::ForgettingAttnOptions options;
  options.logit_bound = t.logit_bound;
  if (pruned) options.log_pruning_tolerance = kLogPruningTolerance;
  const auto kernel = x.device.is_cpu() ? kernels::simd_paths().front() : std::string("cuda");
  AttentionContender c{blank_line(x, "forgetting_attn", gates, pruned, kernel),
                       [=] { return ops::forgetting_attn(t.q, t.k, t.v, log_f, options).o_BTHD; },
                       {t.q, t.k, t.v},
                       t.d_o};
  if (log_f) c.inputs.push_back(*log_f);
  if (pruned) c.line.kept = ops::forgetting_attn_kept_share(t.q, t.k, *log_f, options).mean().item<double>();
  return c;
}

/// The first is what ratios are taken to.
std::vector<AttentionContender> make_contenders(const Problem& x, const AttentionTensors& t, bool prune) {
  std::vector<AttentionContender> all;
  if (x.device.is_cpu()) {
    all.push_back(sdpa(x, t, "sdpa", "off", "torch"));
    all.push_back(sdpa(x, t, "sdpa_float_mask", "on", "torch", t.mask));
  } else if (t.q.element_size() == 2) {
    for (const char* kernel : {"cudnn", "flash"}) all.push_back(sdpa(x, t, "sdpa", "off", kernel));
  } else {  // neither of the two takes float32
    all.push_back(sdpa(x, t, "sdpa", "off", "torch"));
  }
  all.push_back(fox(x, t, "off", std::nullopt, false));
  all.push_back(fox(x, t, "on", t.log_f_on, false));
  all.push_back(fox(x, t, "log_spaced", t.log_f_log_spaced, false));
  if (prune) all.push_back(fox(x, t, "log_spaced", t.log_f_log_spaced, true));
  return all;
}

using Times = std::map<std::string, std::vector<double>>;  // by direction

/// Forward alone, then backward through a graph made once.
void take_turn(const AttentionContender& c, at::Device device, Times& times) {
  double forward;
  {
    at::NoGradGuard no_grad;
    forward = time_ms(device, c.forward_calls, c.forward);
  }
  const auto o = c.forward();
  const double backward =
      time_ms(device, c.backward_calls, [&] { torch::autograd::grad({o}, c.inputs, {c.d_o}, /*retain_graph=*/true); });
  times["forward"].push_back(forward);
  times["backward"].push_back(backward);
  times["forward_backward"].push_back(forward + backward);
}

void measure(const Problem& x, const AttentionOptions& options,
             const std::function<void(const AttentionMeasurement&)>& report) {
  auto contenders = make_contenders(x, make_tensors(x, options.seed), options.prune);
  warm_up(x.device, [&] {
    for (auto& c : contenders) {
      Times times;
      take_turn(c, x.device, times);
      c.forward_calls = calls_a_turn(x.device, times["forward"][0]);
      c.backward_calls = calls_a_turn(x.device, times["backward"][0]);
    }
  });
  std::vector<Times> times(contenders.size());
  for (int64_t turn = 0; turn < options.repetitions; ++turn) {
    for (const size_t i : order_of_turn(contenders.size(), turn)) take_turn(contenders[i], x.device, times[i]);
  }
  const double forward_flops = 2.0 * static_cast<double>(x.B * x.H * x.T * x.T * x.D);
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
      line.ratio = quantile(times[0].at(direction), 0.5) / line.ms;
      report(line);
    }
  }
}

}  // namespace

void bench_attention(const AttentionOptions& x, const std::function<void(const AttentionMeasurement&)>& report) {
  if (x.repetitions < 1) throw Error(fmt::format("repetitions is {}", x.repetitions), "at least 1");
  const auto device = ops::open_device(x.device);
  if (x.threads > 0) at::set_num_threads(static_cast<int>(x.threads));
  auto lengths = x.lengths;
  if (lengths.empty()) {
    lengths = device.is_cpu() ? std::vector<int64_t>{1024, 2048, 4096} : std::vector<int64_t>{4096, 16384, 65536};
  }
  for (const int64_t length : lengths) measure(make_problem(x, device, length), x, report);
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
  return fmt::format("{:<16} {:<8} {:<17} {:<11} {:<6} {:>6} {:>9} {:>8} {:>8} {:>7} {:>6}", "op", "kernel",
                     "direction", "gates", "pruned", "T", "ms", "spread", "TFLOP/s", "ratio", "kept");
}

std::string table_row(const AttentionMeasurement& m) {
  return fmt::format("{:<16} {:<8} {:<17} {:<11} {:<6} {:>6} {:>9.3f} {:>8.3f} {:>8.3f} {:>6.2f}x {:>5.1f}%", m.op,
                     m.kernel, m.direction, m.gates, m.pruned ? "yes" : "no", m.T, m.ms, m.ms_spread, m.tflops, m.ratio,
                     100 * m.kept);
}

}  // namespace fox::bench
