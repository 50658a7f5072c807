#include "bench/mixers.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "bench/inputs.h"
#include "bench/timing.h"
#include "mixers/mixer.h"
#include "mixers/recurrent_slot.h"
#include "ops/delta_net.h"
#include "ops/device.h"
#include "ops/forgetting_attn.h"
#include "ops/hgrn2.h"
#include "ops/mamba.h"
#include "ops/mamba2.h"

namespace fox::bench {
namespace {

constexpr int64_t kChunk = 64;  // of every recurrence but mamba

/// A product of the chunked form: `count` matrices (m, k) times (k, n).
struct Product {
  int64_t count, m, k, n;
  double flops() const { return 2.0 * static_cast<double>(count * m * k * n); }
};

/// One operator on its inputs.
struct Contender {
  MixersMeasurement line;
  std::function<at::Tensor()> forward;
  std::vector<at::Tensor> inputs;
  std::vector<Product> products;  // of the forward pass
  double flops = 0;               // of the forward pass, where no products of chunks are compared
};

/// What all contenders of one length are made for.
struct Size {
  at::ScalarType type, gate_type;
  at::Device device;
  int64_t batch, length, width;

  at::Tensor leaf(const at::Tensor& x) const { return x.to(device, type).requires_grad_(); }
  at::Tensor gate(const at::Tensor& x) const { return x.to(device, gate_type).requires_grad_(); }
  at::Tensor random(std::vector<int64_t> rest) const {
    rest.insert(rest.begin(), {batch, length});
    return at::randn(rest, at::device(device));
  }
  MixersMeasurement line(const char* op, int64_t heads, int64_t keys, int64_t values) const {
    MixersMeasurement m;
    m.op = op, m.B = batch, m.T = length, m.width = width, m.H = heads, m.K = keys, m.V = values;
    return m;
  }
  int64_t chunks(int64_t heads) const { return batch * heads * ((length + kChunk - 1) / kChunk); }
};

Contender forgetting_attn(const Size& s) {
  const int64_t D = 64, H = s.width / D;
  const auto q = s.leaf(rms_normalised(s.random({H, D}))), k = s.leaf(rms_normalised(s.random({H, D})));
  const auto v = s.leaf(s.random({H, D})), log_f = s.gate(at::log_sigmoid(s.random({H}) + 4));
  return {s.line("forgetting_attn", H, D, D),
          [=] { return ops::forgetting_attn(q, k, v, log_f, {}).o_BTHD; },
          {q, k, v, log_f},
          {},
          2.0 * static_cast<double>(s.batch * H * s.length * s.length * D)};
}

Contender hgrn2(const Size& s) {
  const int64_t D = 128, H = s.width / D, n = s.chunks(H);
  const auto log_g = at::log_sigmoid(s.random({H, D}) * 2 + 2);
  const auto q = s.leaf(s.random({H, D})), k = s.leaf(1 - log_g.exp()), v = s.leaf(s.random({H, D})), g = s.gate(log_g);
  return {s.line("hgrn2", H, D, D),
          [=] { return ops::hgrn2(q, k, v, g).o; },
          {q, k, v, g},
          {{n, kChunk, D, kChunk}, {n, kChunk, kChunk, D}, {n, D, kChunk, D}, {n, kChunk, D, D}}};
}

Contender delta_net(const Size& s) {
  const int64_t D = 128, H = s.width / D, n = s.chunks(H);
  const auto unit = [&] { return s.leaf(rms_normalised(s.random({H, D})) / std::sqrt(static_cast<double>(D))); };
  const auto q = unit(), k = unit(), v = s.leaf(s.random({H, D})), beta = s.gate(at::sigmoid(s.random({H})));
  // Keys with keys, the triangular system, what is written, the state, weights, both reads. The CPU goes from state to
  // state and solves for the values that are written; the WY form of other devices solves for the keys too.
  const int64_t right_sides = s.device.is_cpu() ? D : 2 * D;
  return {s.line("delta_net", H, D, D),
          [=] { return ops::delta_net(q, k, v, beta).o; },
          {q, k, v, beta},
          {{n, kChunk, D, kChunk},
           {n, kChunk, kChunk, right_sides},
           {n, kChunk, D, D},
           {n, D, kChunk, D},
           {n, kChunk, D, kChunk},
           {n, kChunk, kChunk, D},
           {n, kChunk, D, D}}};
}

Contender mamba2(const Size& s) {
  const int64_t P = 64, N = 128, H = 2 * s.width / P, n = s.chunks(H);
  const auto x = s.leaf(s.random({H, P})), dt = s.gate(at::softplus(s.random({H}) - 2));
  const auto b = s.leaf(s.random({N})), c = s.leaf(s.random({N}));
  const auto a = s.gate(-at::linspace(1, 16, H)), d = s.gate(at::ones({H}));
  return {s.line("mamba2", H, N, P),
          [=] { return ops::mamba2(x, dt, a, b, c, d).o; },
          {x, dt, a, b, c, d},
          {{s.chunks(1), kChunk, N, kChunk}, {n, kChunk, kChunk, P}, {n, P, kChunk, N}, {n, kChunk, N, P}}};
}

Contender mamba(const Size& s) {
  const int64_t I = 2 * s.width, N = 16;
  const auto x = s.leaf(s.random({I})), dt = s.gate(at::softplus(s.random({I}) - 2));
  const auto b = s.leaf(s.random({N})), c = s.leaf(s.random({N}));
  const auto a = s.gate(-at::linspace(1, N, N).expand({I, N}).contiguous()), d = s.gate(at::ones({I}));
  ops::RecurrenceOptions options;
  options.chunk_size = 16;
  return {s.line("mamba", 1, N, I), [=] { return ops::mamba(x, dt, a, b, c, d, options).o; }, {x, dt, a, b, c, d}, {}};
}

/// A contender's products by at::matmul, each into a tensor of its own.
std::function<void()> products_by_matmul(const std::vector<Product>& products, const Size& s) {
  std::vector<std::pair<at::Tensor, at::Tensor>> factors;
  for (const auto& p : products) {
    factors.emplace_back(at::randn({p.count, p.m, p.k}).to(s.device, s.type),
                         at::randn({p.count, p.k, p.n}).to(s.device, s.type));
  }
  return [factors] {
    const at::NoGradGuard no_grad;
    for (const auto& [left, right] : factors) at::matmul(left, right);
  };
}

/// Calls `work` once; returns the most memory that it needed beside what was there, in MiB (CUDA only).
double peak_mib(at::Device device, const std::function<void()>& work) {
  if (device.is_cpu()) return 0;
  auto* allocator = at::getDeviceAllocator(device.type());
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  allocator->resetPeakStats(device.index());
  const auto before = allocator->getDeviceStats(device.index()).allocated_bytes[kAll].current;
  work();
  const auto peak = allocator->getDeviceStats(device.index()).allocated_bytes[kAll].peak;
  return static_cast<double>(peak - before) / (1 << 20);
}

constexpr const char* kMatmul = "matmul";

/// Forward without a graph; forward and backward; where products are compared, those of the forward pass by at::matmul.
std::map<std::string, std::function<void()>> works_of(const Contender& c, const Size& s) {
  std::map<std::string, std::function<void()>> works{{"forward",
                                                      [&c] {
                                                        const at::NoGradGuard no_grad;
                                                        c.forward();
                                                      }},
                                                     {"forward_backward", [&c] {
                                                        const auto o = c.forward();
                                                        torch::autograd::grad({o}, c.inputs, {at::ones_like(o)});
                                                      }}};
  if (s.device.is_cpu() && !c.products.empty()) works[kMatmul] = products_by_matmul(c.products, s);
  return works;
}

void put_times(MixersMeasurement& line, const std::vector<double>& ms) {
  const Summary of_turns = summarise(ms);
  line.ms = of_turns.median, line.ms_spread = of_turns.spread;
}

void bench_length(const MixersOptions& x, const Size& s, const std::function<void(const MixersMeasurement&)>& report) {
  at::manual_seed(x.seed);
  const std::vector<Contender> all{forgetting_attn(s), mamba2(s), hgrn2(s), delta_net(s), mamba(s)};
  std::vector<std::map<std::string, std::function<void()>>> works;
  for (const auto& c : all) works.push_back(works_of(c, s));
  std::vector<std::map<std::string, std::vector<double>>> times(all.size());
  for (int64_t turn = 0; turn <= x.repetitions; ++turn) {
    for (size_t i = 0; i < all.size(); ++i) {
      for (const auto& [name, work] : works[i]) {
        const double ms = time_ms(s.device, 1, work);
        if (turn > 0) times[i][name].push_back(ms);
      }
    }
  }
  for (size_t i = 0; i < all.size(); ++i) {
    double flops = all[i].flops;
    for (const auto& p : all[i].products) flops += p.flops();
    for (const auto* direction : {"forward", "forward_backward"}) {
      auto line = all[i].line;
      line.direction = direction, line.dtype = x.dtype;
      put_times(line, times[i][direction]);
      line.tokens_per_s = 1e3 * static_cast<double>(s.batch * s.length) / line.ms;
      line.gflops = (line.direction == "forward" ? 1 : 3) * flops / line.ms / 1e6;
      if (const auto matmul = times[i].find(kMatmul); matmul != times[i].end()) {
        line.matmul_gflops = flops / quantile(matmul->second, 0.5) / 1e6;
        line.ratio = line.gflops / line.matmul_gflops;
      }
      line.peak_mib = peak_mib(s.device, works[i][direction]);
      report(line);
    }
  }
}

// -------------------------------------------------------------------------------------------------------- decoding

/// A model of one layer of each kind, as published but for the width.
std::map<std::string, ModelConfig> layer_configs(int64_t width) {
  std::map<std::string, ModelConfig> all;
  const auto add = [&](const char* op, const char* type, const std::function<void(ModelConfig&)>& set) {
    ModelConfig c;
    c.model_type = type, c.hidden_size = width, c.num_hidden_layers = 1, c.vocab_size = 2;
    set(c);
    all.emplace(op, c);
  };
  add("forgetting_attn", "forgetting_transformer-project_fox", [&](auto& c) { c.num_heads = width / 64; });
  add("mamba2", "mamba2-project_fox", [&](auto& c) { c.num_heads = 2 * width / 64, c.state_size = 128; });
  add("hgrn2", "hgrn2-project_fox", [](auto&) {});
  add("delta_net", "delta_net-project_fox", [&](auto& c) { c.num_heads = width / 128; });
  add("mamba", "samba-project_fox", [&](auto& c) { c.num_heads = width / 64, c.state_size = 16; });
  return all;
}

int64_t bytes_of(const nn::CacheSlot* slot) {
  const auto* recurrent = dynamic_cast<const mixers::RecurrentSlot*>(slot);
  if (!recurrent) return 0;
  int64_t bytes = static_cast<int64_t>(recurrent->state.nbytes());
  for (const auto& tail : recurrent->conv) bytes += static_cast<int64_t>(tail.inputs.nbytes());
  return bytes;
}

/// A layer with `position` tokens behind it, one more at a time. The cache grows by a token a repetition.
void bench_decode(const MixersOptions& x, const std::string& op, const ModelConfig& config, int64_t position,
                  const Size& s, const std::function<void(const MixersMeasurement&)>& report) {
  const at::NoGradGuard no_grad;
  at::manual_seed(x.seed);
  const auto mixer = mixers::make_mixer(config, 0, {});
  mixer->init();
  nn::Parameters parameters;
  mixer->collect("", parameters);
  for (auto& p : parameters) p.tensor.set_data(p.tensor.to(s.device));
  const auto slot = mixer->make_slot();
  nn::Sequence sequence;
  constexpr int64_t kPiece = 4096;
  const auto feed = [&](const at::Tensor& tokens) {
    mixer->forward(tokens, sequence, slot.get());
    sequence.offset += tokens.size(1);
  };
  for (int64_t t = 0; t < position; t += kPiece) {
    feed(at::randn({1, std::min(kPiece, position - t), s.width}, at::device(s.device)).to(s.type));
  }
  const auto token = at::randn({1, 1, s.width}, at::device(s.device)).to(s.type);
  constexpr int64_t kCalls = 10;
  std::vector<double> ms;
  for (int64_t turn = 0; turn <= x.repetitions; ++turn) {
    const double taken = time_ms(s.device, kCalls, [&] { feed(token); });
    if (turn > 0) ms.push_back(taken);
  }
  MixersMeasurement line = s.line(op.c_str(), 0, 0, 0);
  line.direction = "decode", line.dtype = x.dtype, line.T = position;
  put_times(line, ms);
  line.tokens_per_s = 1e3 / line.ms;
  line.cache_bytes = bytes_of(slot.get());
  report(line);
}

/// The options with nothing left out.
MixersOptions complete(MixersOptions x, bool cpu) {
  if (x.dtype.empty()) x.dtype = cpu ? "float32" : "bfloat16";
  if (x.lengths.empty())
    x.lengths = cpu ? std::vector<int64_t>{512, 1024, 2048} : std::vector<int64_t>{2048, 8192, 32768, 65536};
  if (x.positions.empty())
    x.positions = cpu ? std::vector<int64_t>{64, 1024} : std::vector<int64_t>{1024, 16384, 65536};
  if (x.tokens == 0) x.tokens = cpu ? 2048 : 65536;
  if (x.width == 0) x.width = cpu ? 256 : 1536;
  if (x.repetitions < 1) throw Error(fmt::format("repetitions is {}", x.repetitions), "at least 1");
  if (x.width < 128 || x.width % 128 != 0) {
    throw Error(fmt::format("width is {}", x.width), "a multiple of 128, the largest head among the mixers");
  }
  for (const int64_t length : x.lengths) {
    if (length < 1) throw Error(fmt::format("length {}", length), "lengths are at least 1");
  }
  for (const int64_t position : x.positions) {
    if (position < 1) throw Error(fmt::format("position {}", position), "positions are at least 1");
  }
  return x;
}

}  // namespace

void bench_mixers(const MixersOptions& options, const std::function<void(const MixersMeasurement&)>& report) {
  const auto device = ops::open_device(options.device);
  const auto x = complete(options, device.is_cpu());
  if (x.threads > 0) at::set_num_threads(static_cast<int>(x.threads));
  const auto type = dtype_of(x.dtype);
  Size s{type, type == at::kDouble ? at::kDouble : at::kFloat, device, 1, 1, x.width};
  for (const int64_t length : x.lengths) {
    s.length = length, s.batch = std::max<int64_t>(1, x.tokens / length);
    bench_length(x, s, report);
  }
  s.batch = 1;
  for (const int64_t position : x.positions) {
    for (const auto& [op, config] : layer_configs(x.width)) bench_decode(x, op, config, position, s, report);
  }
}

std::string to_json(const MixersMeasurement& m) {
  return nlohmann::ordered_json{{"op", m.op},
                                {"direction", m.direction},
                                {"dtype", m.dtype},
                                {"B", m.B},
                                {"T", m.T},
                                {"width", m.width},
                                {"H", m.H},
                                {"K", m.K},
                                {"V", m.V},
                                {"ms", m.ms},
                                {"ms_spread", m.ms_spread},
                                {"tokens_per_s", m.tokens_per_s},
                                {"gflops", m.gflops},
                                {"matmul_gflops", m.matmul_gflops},
                                {"ratio", m.ratio},
                                {"peak_mib", m.peak_mib},
                                {"cache_bytes", m.cache_bytes}}
      .dump();
}

std::string mixers_table_head() {
  return fmt::format("{:<16} {:<17} {:>4} {:>6} {:>9} {:>8} {:>11} {:>9} {:>6} {:>9}", "op", "direction", "B", "T",
                     "ms", "spread", "tokens/s", "GFLOP/s", "ratio", "peak MiB");
}

std::string table_row(const MixersMeasurement& m) {
  // 0 is what was not measured.
  const auto measured = [](double value, fmt::format_string<double&> format) {
    return value == 0 ? "–" : fmt::format(format, value);
  };
  return fmt::format("{:<16} {:<17} {:>4} {:>6} {:>9.3f} {:>8.3f} {:>11.0f} {:>9} {:>6} {:>9}", m.op, m.direction, m.B,
                     m.T, m.ms, m.ms_spread, m.tokens_per_s, measured(m.gflops, "{:.1f}"), measured(m.ratio, "{:.2f}x"),
                     measured(m.peak_mib, "{:.1f}"));
}

}  // namespace fox::bench
