#include "bench/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
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
  at::Tensor d_o;  // in the output's layout
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

std::vector<Work> forward_works(const std::vector<AttentionContender>& contenders) {
  std::vector<Work> works;
  for (const auto& c : contenders) {
    works.push_back({[forward = c.forward] {
      const at::NoGradGuard no_grad;
      forward();
    }});
  }
  return works;
}

/// Backward through graphs made here, once.
std::vector<Work> backward_works(const std::vector<AttentionContender>& contenders) {
  std::vector<Work> works;
  for (const auto& c : contenders) {
    works.push_back({[o = c.forward(), inputs = c.inputs, d_o = c.d_o] {
      torch::autograd::grad({o}, inputs, {d_o}, /*retain_graph=*/true);
    }});
  }
  return works;
}

using Times = std::vector<std::vector<double>>;  // milliseconds of a contender in a round

Times time_rounds(at::Device device, const std::vector<Work>& works, int64_t rounds) {
  Times times(works.size());
  for (int64_t round = 0; round < rounds; ++round) {
    const auto ms = time_round(device, works, order_of_turn(works.size(), round));
    for (size_t i = 0; i < ms.size(); ++i) times[i].push_back(ms[i]);
  }
  return times;
}

Times sum(const Times& a, const Times& b) {
  Times total = a;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t round = 0; round < a[i].size(); ++round) total[i][round] += b[i][round];
  }
  return total;
}

void report_direction(const char* direction, double flops, const std::vector<AttentionContender>& contenders,
                      const Times& times, const std::function<void(const AttentionMeasurement&)>& report) {
  const auto is_gate_off = [](const AttentionContender& c) {
    return c.line.op == "forgetting_attn" && c.line.gates == "off";
  };
  const auto off =
      static_cast<size_t>(std::find_if(contenders.begin(), contenders.end(), is_gate_off) - contenders.begin());
  for (size_t i = 0; i < contenders.size(); ++i) {
    auto line = contenders[i].line;
    const Summary ms = summarise(times[i]), ratio = summarise(quotients(times[0], times[i]));
    line.direction = direction;
    line.rounds = static_cast<int64_t>(times[i].size());
    line.ms = ms.median, line.ms_spread = ms.spread;
    line.tflops = flops / line.ms / 1e9;
    line.ratio = ratio.median, line.ratio_spread = ratio.spread;
    if (line.op == "forgetting_attn" && i != off && !line.pruned) {
      const Summary cost = summarise(quotients(times[i], times[off]));
      line.gate_cost = 100 * (cost.median - 1), line.gate_cost_spread = 100 * cost.spread;
    }
    report(line);
  }
}

void measure(const Problem& x, const AttentionOptions& options,
             const std::function<void(const AttentionMeasurement&)>& report) {
  constexpr double kTurnMs = 0.5;  // what is shorter is done several times: recording events takes microseconds
  const auto contenders = make_contenders(x, make_tensors(x, options.seed), options.prune);
  auto forward = forward_works(contenders), backward = backward_works(contenders);
  const double round_ms = warm_up(x.device, [&] {
    for (auto* works : {&forward, &backward}) {
      const auto ms = time_round(x.device, *works, order_of_turn(works->size(), 0));
      for (size_t i = 0; i < ms.size(); ++i) (*works)[i].calls = calls_a_turn(x.device, ms[i], kTurnMs);
    }
  });
  const int64_t rounds = options.repetitions > 0 ? options.repetitions : rounds_within(options.seconds, round_ms);
  // One direction after the other: their powers, and so their clocks, differ.
  const Times forward_ms = time_rounds(x.device, forward, rounds),
              backward_ms = time_rounds(x.device, backward, rounds);
  const double forward_flops = 2.0 * static_cast<double>(x.B * x.H * x.T * x.T * x.D);
  report_direction("forward", forward_flops, contenders, forward_ms, report);
  report_direction("backward", 2.5 * forward_flops, contenders, backward_ms, report);
  report_direction("forward_backward", 3.5 * forward_flops, contenders, sum(forward_ms, backward_ms), report);
}

}  // namespace

void bench_attention(const AttentionOptions& x, const std::function<void(const AttentionMeasurement&)>& report) {
  if (x.repetitions < 0)
    throw Error(fmt::format("repetitions is {}", x.repetitions), "at least 1, or 0 for what fits `seconds`");
  if (!(x.seconds > 0)) throw Error(fmt::format("seconds is {}", x.seconds), "above 0");
  const auto device = ops::open_device(x.device);
  if (x.threads > 0) at::set_num_threads(static_cast<int>(x.threads));
  auto lengths = x.lengths;
  if (lengths.empty()) {
    lengths = device.is_cpu() ? std::vector<int64_t>{1024, 2048, 4096} : std::vector<int64_t>{4096, 16384, 65536};
  }
  for (const int64_t length : lengths) measure(make_problem(x, device, length), x, report);
}

std::string to_json(const AttentionMeasurement& m) {
  return nlohmann::ordered_json{{"op", m.op},
                                {"direction", m.direction},
                                {"gates", m.gates},
                                {"pruned", m.pruned},
                                {"kernel", m.kernel},
                                {"dtype", m.dtype},
                                {"B", m.B},
                                {"T", m.T},
                                {"H", m.H},
                                {"D", m.D},
                                {"rounds", m.rounds},
                                {"ms", m.ms},
                                {"ms_spread", m.ms_spread},
                                {"tflops", m.tflops},
                                {"ratio", m.ratio},
                                {"ratio_spread", m.ratio_spread},
                                {"gate_cost", m.gate_cost},
                                {"gate_cost_spread", m.gate_cost_spread},
                                {"kept", m.kept}}
      .dump();
}

std::string table_head() {
  return fmt::format("{:<16} {:<7} {:<17} {:<11} {:<6} {:>6} {:>9} {:>6} {:>8} {:>6} {:>5} {:>6} {:>5} {:>6}", "op",
                     "kernel", "direction", "gates", "pruned", "T", "ms", "±", "TFLOP/s", "ratio", "±", "gate", "±",
                     "kept");
}

std::string table_row(const AttentionMeasurement& m) {
  const auto measured = [](double value, fmt::format_string<double&> format) {
    return std::isnan(value) ? "–" : fmt::format(format, value);
  };
  return fmt::format(
      "{:<16} {:<7} {:<17} {:<11} {:<6} {:>6} {:>9.3f} {:>6.3f} {:>8.3f} {:>5.2f}x {:>5.2f} {:>6} {:>5} {:>5.1f}%",
      m.op, m.kernel, m.direction, m.gates, m.pruned ? "yes" : "no", m.T, m.ms, m.ms_spread, m.tflops, m.ratio,
      m.ratio_spread, measured(m.gate_cost, "{:+.1f}%"), measured(m.gate_cost_spread, "{:.1f}"), 100 * m.kept);
}

}  // namespace fox::bench
