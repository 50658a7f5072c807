#include "bench/elementwise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "bench/inputs.h"
#include "bench/timing.h"
#include "ops/add_rms_norm.h"
#include "ops/attn_input.h"
#include "ops/attn_input_schema.h"
#include "ops/common.h"
#include "ops/device.h"
#include "ops/gate.h"
#include "ops/gated_rms_norm.h"
#include "ops/hgrn2_gate.h"
#include "ops/hgrn2_gate_schema.h"
#include "ops/linear_cross_entropy.h"
#include "ops/rms_norm.h"
#include "ops/rotary.h"
#include "ops/short_conv.h"
#include "ops/short_conv_schema.h"
#include "ops/swiglu.h"
#include "ops/swiglu_schema.h"
#include "ops/time_step.h"
#include "ops/time_step_schema.h"
#include "ops/token_shift.h"

namespace fox::bench {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

/// An operator in one direction: what it reads, and a call that hands back what it writes.
struct Case {
  std::string op, direction;
  Tensors inputs;
  std::function<Tensors()> run;
};

double bytes_of(const Tensors& tensors) {
  double bytes = 0;
  for (const auto& t : tensors) bytes += t.defined() ? static_cast<double>(t.nbytes()) : 0;
  return bytes;
}

Tensors as_list(const std::tuple<Tensor, Tensor>& t) { return {std::get<0>(t), std::get<1>(t)}; }
Tensors as_list(const std::tuple<Tensor, Tensor, Tensor>& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t)};
}

/// What all operators of one size read.
struct Inputs {
  Tensor x_NC, dy_NC, gate_NC, stream_NC, dstream_NC, weight_C, weight_D, taps_C4, lower_C;
  Tensor x_BTHD, dy_BTHD, logits_BTH, alpha_BTH, gate_up, dmlp;

  Inputs(int64_t rows, int64_t width, int64_t head_dim, at::ScalarType type, at::Device device) {
    const auto options = at::TensorOptions(device).dtype(type);
    const auto masters = options.dtype(ops::compute_type(type));
    const int64_t heads = width / head_dim, mlp_width = 256 * ((width * 7 / 3 + 255) / 256);  // of the published models
    x_NC = at::randn({rows, width}, options);
    dy_NC = at::randn({rows, width}, options);
    gate_NC = at::randn({rows, width}, options);
    stream_NC = at::randn({rows, width}, masters);
    dstream_NC = at::randn({rows, width}, masters);
    weight_C = at::randn({width}, masters);
    weight_D = at::randn({head_dim}, masters);
    taps_C4 = at::randn({width, 4}, masters);
    lower_C = at::rand({width}, masters);
    x_BTHD = x_NC.view({1, rows, heads, head_dim});
    dy_BTHD = dy_NC.view({1, rows, heads, head_dim});
    logits_BTH = at::randn({1, rows, heads}, options);
    alpha_BTH = at::sigmoid(logits_BTH);
    gate_up = at::randn({rows, 2 * mlp_width}, options);
    dmlp = at::randn({rows, mlp_width}, options);
  }
};

constexpr double kEps = 1e-6, kRotaryBase = 5e5;

void add_norms(const Inputs& in, int64_t heads, std::vector<Case>& cases) {
  using NormBackward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const OptionalTensor&, double, int64_t);
  const auto norm = ops::find_operator<NormBackward>("fox::rms_norm_backward");
  const auto add = [&](const char* op, const Tensor& weight, int64_t groups) {
    cases.push_back(
        {op, "forward", {in.x_NC, weight}, [=] { return Tensors{ops::rms_norm(in.x_NC, weight, kEps, groups)}; }});
    cases.push_back({op, "backward", {in.dy_NC, in.x_NC, weight}, [=] {
                       return as_list(norm.call(in.dy_NC, in.x_NC, weight, kEps, groups));
                     }});
  };
  add("rms_norm", in.weight_C, 1);
  add("rms_norm per head", in.weight_D, heads);

  using AddBackward =
      std::tuple<Tensor, Tensor, Tensor>(const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&, double);
  const auto added = ops::find_operator<AddBackward>("fox::add_rms_norm_backward");
  cases.push_back({"add_rms_norm", "forward", {in.stream_NC, in.x_NC, in.weight_C}, [=] {
                     const auto result = ops::add_rms_norm(in.stream_NC, in.x_NC, in.weight_C, kEps);
                     return Tensors{result.sum, result.normed};
                   }});
  cases.push_back({"add_rms_norm", "backward", {in.dstream_NC, in.dy_NC, in.stream_NC, in.weight_C}, [=] {
                     return as_list(added.call(in.dstream_NC, in.dy_NC, in.stream_NC, in.weight_C, kEps));
                   }});

  using GatedBackward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                           double, int64_t, bool);
  const auto gated = ops::find_operator<GatedBackward>("fox::gated_rms_norm_backward");
  cases.push_back({"gated_rms_norm", "forward", {in.x_NC, in.gate_NC, in.weight_C}, [=] {
                     return Tensors{ops::gated_rms_norm(in.x_NC, in.gate_NC, in.weight_C, kEps, heads, false)};
                   }});
  cases.push_back({"gated_rms_norm", "backward", {in.dy_NC, in.x_NC, in.gate_NC, in.weight_C}, [=] {
                     return as_list(gated.call(in.dy_NC, in.x_NC, in.gate_NC, in.weight_C, kEps, heads, false));
                   }});
}

void add_attention_inputs(const Inputs& in, std::vector<Case>& cases) {
  using ShiftBackward = std::tuple<Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&);
  const auto shift = ops::find_operator<ShiftBackward>("fox::token_shift_backward");
  cases.push_back({"token_shift", "forward", {in.x_BTHD, in.alpha_BTH}, [=] {
                     return Tensors{ops::token_shift(in.x_BTHD, in.alpha_BTH)};
                   }});
  cases.push_back({"token_shift", "backward", {in.dy_BTHD, in.x_BTHD, in.alpha_BTH}, [=] {
                     return as_list(shift.call(in.dy_BTHD, in.x_BTHD, in.alpha_BTH, {}, {}, {}));
                   }});
  cases.push_back({"rotary", "forward", {in.x_BTHD}, [=] { return Tensors{ops::rotary(in.x_BTHD, kRotaryBase)}; }});

  const auto backward = ops::find_operator<ops::AttnInputBackward>("fox::attn_input_backward");
  const auto add = [&](const char* op, bool shifts, bool rotates) {
    ops::AttnInputOptions options{.norm_weight = in.weight_D, .norm_eps = kEps};
    if (shifts) options.shift_logits_BTH = in.logits_BTH;
    if (rotates) options.rotary_base = kRotaryBase;
    Tensors inputs{in.x_BTHD, in.weight_D};
    if (shifts) inputs.push_back(in.logits_BTH);
    cases.push_back({op, "forward", inputs, [=] { return Tensors{ops::attn_input(in.x_BTHD, options)}; }});
    inputs.push_back(in.dy_BTHD);
    cases.push_back({op, "backward", inputs, [=] {
                       const auto [dx, dshift, dprev, dweight] =
                           backward.call(in.dy_BTHD, in.x_BTHD, options.shift_logits_BTH, {}, {}, {},
                                         options.norm_weight, options.norm_eps, options.rotary_base, 0);
                       return Tensors{dx, dshift, dweight};
                     }});
  };
  add("attn_input norm", false, false);
  add("attn_input shift norm", true, false);
  add("attn_input shift norm rotary", true, true);
}

/// Mamba-2's and DeltaNet's convolution of four taps, and what ATen's operators make of it.
void add_short_convolutions(const Inputs& in, std::vector<Case>& cases) {
  const auto x = in.x_NC.unsqueeze(0), dy = in.dy_NC.unsqueeze(0), taps = in.taps_C4.t();
  const auto backward = ops::find_operator<ops::ShortConvBackward>("fox::short_conv_backward");
  const Tensors inputs{x, taps, in.weight_C}, with_dy{dy, x, taps, in.weight_C};
  cases.push_back({"short_conv", "forward", inputs, [=] { return Tensors{ops::short_conv(x, taps, in.weight_C)}; }});
  cases.push_back({"short_conv", "backward", with_dy, [=] {
                     const auto [dx, dtaps, dbias, dbefore] = backward.call(dy, x, taps, in.weight_C, {}, {});
                     return Tensors{dx, dtaps, dbias};
                   }});
  cases.push_back({"short_conv by ATen", "forward", inputs,
                   [=] { return Tensors{ops::short_conv_reference(x, taps, in.weight_C)}; }});
  const at::AutoGradMode with_graph(true);
  const Tensors leaves{x.detach().requires_grad_(), taps.detach().requires_grad_(),
                       in.weight_C.detach().requires_grad_()};
  const auto y = ops::short_conv_reference(leaves[0], leaves[1], leaves[2]);
  cases.push_back({"short_conv by ATen", "backward", with_dy,
                   [=] { return torch::autograd::grad({y}, leaves, {dy}, /*retain_graph=*/true); }});
}

void add_others(const Inputs& in, std::vector<Case>& cases) {
  const auto gates = ops::find_operator<ops::Hgrn2GateBackward>("fox::hgrn2_gate_backward");
  cases.push_back({"hgrn2_gate", "forward", {in.x_NC, in.lower_C}, [=] {
                     const auto gate = ops::hgrn2_gate(in.x_NC, in.lower_C);
                     return Tensors{gate.log_g, gate.k};
                   }});
  cases.push_back({"hgrn2_gate", "backward", {in.dstream_NC, in.dy_NC, in.x_NC, in.lower_C}, [=] {
                     return as_list(gates.call(in.dstream_NC, in.dy_NC, in.x_NC, in.lower_C));
                   }});
  const auto steps = ops::find_operator<ops::TimeStepBackward>("fox::time_step_backward");
  cases.push_back(
      {"time_step", "forward", {in.x_NC, in.weight_C}, [=] { return Tensors{ops::time_step(in.x_NC, in.weight_C)}; }});
  cases.push_back({"time_step", "backward", {in.dstream_NC, in.x_NC, in.weight_C}, [=] {
                     return as_list(steps.call(in.dstream_NC, in.x_NC, in.weight_C));
                   }});
  const auto of_two = ops::find_operator<ops::SwigluOfTwoBackward>("fox::swiglu_of_two_backward");
  cases.push_back(
      {"swiglu of two", "forward", {in.gate_NC, in.x_NC}, [=] { return Tensors{ops::swiglu(in.gate_NC, in.x_NC)}; }});
  cases.push_back({"swiglu of two", "backward", {in.dy_NC, in.gate_NC, in.x_NC}, [=] {
                     return as_list(of_two.call(in.dy_NC, in.gate_NC, in.x_NC));
                   }});
  const auto swiglu = ops::find_operator<ops::SwigluBackward>("fox::swiglu_backward");
  cases.push_back({"swiglu", "forward", {in.gate_up}, [=] { return Tensors{ops::swiglu(in.gate_up)}; }});
  cases.push_back(
      {"swiglu", "backward", {in.dmlp, in.gate_up}, [=] { return Tensors{swiglu.call(in.dmlp, in.gate_up)}; }});
}

/// Turns of all cases, each followed by a copy of as many bytes: half of them read, half of them written.
void measure(std::vector<Case>& cases, ElementwiseMeasurement line, int64_t repetitions, at::Device device,
             const std::function<void(const ElementwiseMeasurement&)>& report) {
  std::vector<double> bytes;
  double largest = 0;
  for (const auto& c : cases) {
    bytes.push_back(bytes_of(c.inputs) + bytes_of(c.run()));
    largest = std::max(largest, bytes.back());
  }
  const auto source = at::zeros({static_cast<int64_t>(largest / 2)}, at::TensorOptions(device).dtype(at::kByte));
  auto target = at::empty_like(source);
  std::vector<std::vector<double>> own(cases.size()), copies(cases.size());
  for (int64_t turn = 0; turn <= repetitions; ++turn) {
    for (size_t i = 0; i < cases.size(); ++i) {
      const auto half = static_cast<int64_t>(bytes[i] / 2);
      const auto to = target.narrow(0, 0, half), from = source.narrow(0, 0, half);
      const int64_t calls = turn == 0 ? 1 : calls_a_turn(device, own[i].front());
      const double ms = time_ms(device, calls, [&] { cases[i].run(); });
      const double copy_ms = time_ms(device, calls, [&] { to.copy_(from); });
      if (turn <= 1) own[i].clear(), copies[i].clear();  // the first turn tells how many calls make the others
      own[i].push_back(ms), copies[i].push_back(copy_ms);
    }
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    line.op = cases[i].op, line.direction = cases[i].direction;
    const Summary ms = summarise(own[i]);
    line.ms = ms.median, line.ms_spread = ms.spread;
    line.gb_per_s = bytes[i] / line.ms / 1e6, line.copy_gb_per_s = bytes[i] / quantile(copies[i], 0.5) / 1e6;
    line.ratio = line.gb_per_s / line.copy_gb_per_s;
    report(line);
  }
}

/// Bytes that the GPU's allocator has given away, now or at most since the last reset.
int64_t allocated(at::Device device, bool peak) {
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  const auto& all = stats.allocated_bytes[0];
  return peak ? all.peak : all.current;
}

ElementwiseMeasurement measure_lm_head(ElementwiseMeasurement line, at::ScalarType type, int64_t repetitions,
                                       at::Device device) {
  const auto op = ops::find_operator<std::tuple<Tensor, Tensor, Tensor, Tensor>(
      const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, bool, bool)>("fox::linear_cross_entropy");
  const auto options = at::TensorOptions(device).dtype(type);
  const auto x = at::randn({line.rows, line.width}, options), w = at::randn({line.vocab, line.width}, options) * 0.02;
  const auto labels = at::randint(line.vocab, {line.rows}, options.dtype(at::kLong));
  const auto run = [&] { op.call(x, w, labels, std::nullopt, true, true); };
  std::vector<double> times;
  for (int64_t turn = 0; turn <= repetitions; ++turn) {
    int64_t before = 0;
    if (!device.is_cpu()) {
      before = allocated(device, false);
      at::getDeviceAllocator(device.type())->resetPeakStats(device.index());
    }
    const double ms = time_ms(device, 1, run);
    if (!device.is_cpu()) line.extra_mib = static_cast<double>(allocated(device, true) - before) / (1 << 20);
    if (turn > 0) times.push_back(ms);
  }
  line.op = "linear_cross_entropy", line.direction = "forward_backward";
  const Summary ms = summarise(times);
  line.ms = ms.median, line.ms_spread = ms.spread;
  return line;
}

}  // namespace

void bench_elementwise(const ElementwiseOptions& x, const std::function<void(const ElementwiseMeasurement&)>& report) {
  if (x.repetitions < 1) throw Error(fmt::format("repetitions is {}", x.repetitions), "at least 1");
  const auto device = ops::open_device(x.device);
  const bool cpu = device.is_cpu();
  if (x.threads > 0) at::set_num_threads(static_cast<int>(x.threads));
  const at::NoGradGuard no_grad;
  at::manual_seed(x.seed);
  const std::string dtype = !x.dtype.empty() ? x.dtype : cpu ? "float32" : "bfloat16";
  using Sizes = std::vector<int64_t>;
  const auto all_rows = !x.rows.empty() ? x.rows : cpu ? Sizes{4096} : Sizes{65536, 16384};
  const auto widths = !x.widths.empty() ? x.widths : cpu ? Sizes{768} : Sizes{768, 1024, 1536};
  ElementwiseMeasurement line{.dtype = dtype};
  for (const int64_t rows : all_rows) {
    for (const int64_t width : widths) {
      if (rows < 1 || width < 1 || x.head_dim < 1 || width % x.head_dim != 0) {
        throw Error(fmt::format("rows {}, width {}, head_dim {}", rows, width, x.head_dim),
                    "each at least 1, the width a multiple of head_dim");
      }
      const Inputs in(rows, width, x.head_dim, dtype_of(dtype), device);
      std::vector<Case> cases;
      add_norms(in, width / x.head_dim, cases);
      add_attention_inputs(in, cases);
      add_short_convolutions(in, cases);
      add_others(in, cases);
      line.rows = rows, line.width = width;
      measure(cases, line, x.repetitions, device, report);
    }
  }
  line.vocab = x.vocab > 0 ? x.vocab : cpu ? 4096 : 50304;
  if (x.lm_head) report(measure_lm_head(line, dtype_of(dtype), x.repetitions, device));
}

std::string to_json(const ElementwiseMeasurement& m) {
  nlohmann::ordered_json json{
      {"op", m.op}, {"direction", m.direction}, {"dtype", m.dtype}, {"rows", m.rows}, {"width", m.width},
      {"ms", m.ms}, {"ms_spread", m.ms_spread}};
  if (m.vocab > 0) {
    json["vocab"] = m.vocab, json["extra_mib"] = m.extra_mib;
  } else {
    json["gb_per_s"] = m.gb_per_s, json["copy_gb_per_s"] = m.copy_gb_per_s, json["ratio"] = m.ratio;
  }
  return json.dump();
}

std::string elementwise_table_head() {
  return fmt::format("{:<29} {:<16} {:<9} {:>6} {:>6} {:>9} {:>8} {:>8} {:>8} {:>6}", "op", "direction", "dtype",
                     "rows", "width", "ms", "spread", "GB/s", "copy", "ratio");
}

std::string elementwise_table_row(const ElementwiseMeasurement& m) {
  const auto begin = fmt::format("{:<29} {:<16} {:<9} {:>6} {:>6} {:>9.4f} {:>8.4f}", m.op, m.direction, m.dtype,
                                 m.rows, m.width, m.ms, m.ms_spread);
  if (m.vocab > 0) return begin + fmt::format("  vocabulary {}, {:.0f} MiB beside its inputs", m.vocab, m.extra_mib);
  return begin + fmt::format(" {:>8.1f} {:>8.1f} {:>6.2f}", m.gb_per_s, m.copy_gb_per_s, m.ratio);
}

}  // namespace fox::bench
