#include "bench/decode.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "bench/inputs.h"
#include "bench/timing.h"
#include "ops/device.h"
#include "ops/forgetting_decode.h"

namespace fox::bench {
namespace {

/// Share of the keys that the last query keeps when pruning: whole blocks of 64, as the operator does.
double kept_share(const at::Tensor& log_f_BTH, double bound) {
  constexpr int64_t kBlock = 64;
  const int64_t keys = log_f_BTH.size(1);
  const auto c = log_f_BTH.to(at::kDouble).cumsum(1);
  const double threshold = -2 * bound - std::log(static_cast<double>(keys)) + kLogPruningTolerance;
  const auto block_ends = c.slice(1, kBlock - 1, keys - 1, kBlock);  // all but the last key's block
  const auto dropped = (c.narrow(1, keys - 1, 1) - block_ends).lt(threshold).sum(1).to(at::kDouble) * kBlock;
  return 1 - dropped.mean().item<double>() / static_cast<double>(keys);
}

struct DecodeContender {
  DecodeMeasurement line;
  std::function<void()> run;
  int64_t calls = 1;  // a turn
  std::vector<double> times = {};
};

std::vector<DecodeContender> make_contenders(const DecodeOptions& x, at::Device device, int64_t keys, int64_t batch) {
  at::manual_seed(x.seed);
  const std::string dtype = !x.dtype.empty() ? x.dtype : device.is_cpu() ? "float32" : "bfloat16";
  const int64_t heads = x.heads > 0 ? x.heads : std::max<int64_t>(1, 1536 / x.head_dim);
  const at::TensorOptions options(device);
  const auto type = dtype_of(dtype);
  // Heads before time, as cuDNN likes it; our cache is paged by head likewise.
  const auto q = rms_normalised(at::randn({batch, heads, 1, x.head_dim}, options)).to(type);
  const auto k = rms_normalised(at::randn({batch, heads, keys, x.head_dim}, options)).to(type);
  const auto v = at::randn({batch, heads, keys, x.head_dim}, options.dtype(type));
  const auto log_f = log_spaced_gates({1, keys, heads}, device).to(at::kFloat).expand({batch, keys, heads});
  const auto bound = logit_bound(heads, x.head_dim, device);
  const auto length = at::full({batch}, keys, options.dtype(at::kInt));
  const auto prefixes = ops::make_gate_prefixes(batch, heads, keys, device);
  ops::append_gate_prefixes(prefixes, log_f, length);

  const auto line = [&](const char* op, const char* gates, bool pruned, const char* kernel) {
    return DecodeMeasurement{.op = op,
                             .gates = gates,
                             .pruned = pruned,
                             .kernel = kernel,
                             .dtype = dtype,
                             .B = batch,
                             .T = keys,
                             .H = heads,
                             .D = x.head_dim};
  };
  std::vector<DecodeContender> all;
  const std::string peer = device.is_cpu() ? "torch" : "cudnn";
  all.push_back({line("sdpa", "off", false, peer.c_str()), [=] {
                   const SdpKernel selected(peer);
                   at::scaled_dot_product_attention(q, k, v);
                 }});
  const auto add = [&](const char* gates, bool gated, bool pruned) {
    ops::ForgettingDecodeOptions decode;
    decode.logit_bound = bound;
    if (pruned) decode.log_pruning_tolerance = kLogPruningTolerance;
    const auto gate = gated ? std::optional(prefixes) : std::nullopt;
    all.push_back({line("forgetting_decode", gates, pruned, device.is_cpu() ? "cpu" : "cuda"), [=] {
                     ops::forgetting_decode(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), length, keys, gate,
                                            decode);
                   }});
  };
  add("off", false, false);
  add("log_spaced", true, false);
  add("log_spaced", true, true);
  all.back().line.kept = kept_share(log_f.narrow(0, 0, 1), bound[0].item<double>());
  return all;
}

void measure(std::vector<DecodeContender>& all, at::Device device, int64_t repetitions) {
  warm_up(device, [&] {
    for (auto& c : all) c.calls = calls_a_turn(device, time_ms(device, c.calls, c.run));
  });
  for (int64_t turn = 0; turn < repetitions; ++turn) {
    for (const size_t i : order_of_turn(all.size(), turn)) {
      all[i].times.push_back(time_ms(device, all[i].calls, all[i].run));
    }
  }
  for (auto& c : all) {
    auto& line = c.line;
    const Summary ms = summarise(c.times);
    line.ms = ms.median, line.ms_spread = ms.spread;
    const auto element = static_cast<double>(at::elementSize(dtype_of(line.dtype)));
    const double bytes = 2 * element * line.kept * static_cast<double>(line.B * line.T * line.H * line.D);
    line.tb_per_s = bytes / line.ms / 1e9;
    line.ratio = line.tb_per_s / all.front().line.tb_per_s;
  }
}

}  // namespace

void bench_decode(const DecodeOptions& x, const std::function<void(const DecodeMeasurement&)>& report) {
  if (x.repetitions < 1) throw Error(fmt::format("repetitions is {}", x.repetitions), "at least 1");
  const at::NoGradGuard no_grad;
  const auto device = ops::open_device(x.device);
  auto sizes = x.sizes;
  if (sizes.empty() && device.is_cpu()) sizes = {{1024, 2}};
  if (sizes.empty()) sizes = {{65536, 1}, {65536, 8}, {16384, 32}};
  for (const auto& [keys, batch] : sizes) {
    if (keys < 1 || batch < 1) throw Error(fmt::format("size {}x{}", keys, batch), "both are at least 1");
    auto contenders = make_contenders(x, device, keys, batch);
    measure(contenders, device, x.repetitions);
    for (const auto& c : contenders) report(c.line);
  }
}

std::string to_json(const DecodeMeasurement& m) {
  return nlohmann::ordered_json{{"op", m.op},
                                {"direction", "forward"},
                                {"gates", m.gates},
                                {"pruned", m.pruned},
                                {"kernel", m.kernel},
                                {"dtype", m.dtype},
                                {"B", m.B},
                                {"T", m.T},
                                {"H", m.H},
                                {"D", m.D},
                                {"ms", m.ms},
                                {"ms_spread", m.ms_spread},
                                {"tb_per_s", m.tb_per_s},
                                {"ratio", m.ratio},
                                {"kept", m.kept}}
      .dump();
}

std::string decode_table_head() {
  return fmt::format("{:<18} {:<8} {:<11} {:<6} {:>6} {:>4} {:>9} {:>8} {:>7} {:>7} {:>6}", "op", "kernel", "gates",
                     "pruned", "keys", "B", "ms", "spread", "TB/s", "ratio", "kept");
}

std::string table_row(const DecodeMeasurement& m) {
  return fmt::format("{:<18} {:<8} {:<11} {:<6} {:>6} {:>4} {:>9.4f} {:>8.4f} {:>7.3f} {:>6.2f}x {:>5.1f}%", m.op,
                     m.kernel, m.gates, m.pruned ? "yes" : "no", m.T, m.B, m.ms, m.ms_spread, m.tb_per_s, m.ratio,
                     100 * m.kept);
}

}  // namespace fox::bench
