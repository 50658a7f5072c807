#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "bench/attention.h"
#include "bench/decode.h"
#include "cli/commands.h"
#include "cli/shared_options.h"

namespace fox::cli {
namespace {

template <class Options>
struct BenchArguments {
  Options options;
  bool json = false;
};

/// Prints each line as it comes. The head waits for the first: a device that is not there prints an error alone.
template <class Measurement>
std::function<void(const Measurement&)> printer(bool json, std::string head) {
  return [json, head, headed = json](const Measurement& line) mutable {
    if (!std::exchange(headed, true)) fmt::print("{}\n", head);
    fmt::print("{}\n", json ? bench::to_json(line) : bench::table_row(line));
    std::fflush(stdout);
  };
}

void run_attention(const BenchArguments<bench::AttentionOptions>& x) {
  bench::bench_attention(x.options, printer<bench::AttentionMeasurement>(x.json, bench::table_head()));
  if (!x.json) {
    fmt::print(
        "\nratio: speed relative to sdpa (causal, no bias; cuDNN's on CUDA); gate: time above gates off\n"
        "Medians over rounds, both within a round; ±: distance of the quartiles\n");
  }
}

void run_decode(const BenchArguments<bench::DecodeOptions>& x) {
  bench::bench_decode(x.options, printer<bench::DecodeMeasurement>(x.json, bench::decode_table_head()));
  if (!x.json) fmt::print("\nTB/s: of kept keys and values; ratio: to that of sdpa (cuDNN's on CUDA)\n");
}

void add_attention(CLI::App& command) {
  CLI::App* attention = command.add_subcommand(
      "attention",
      "Forgetting attention against scaled_dot_product_attention: cuDNN's and flash on CUDA, without "
      "bias and with a float mask on the CPU");
  auto arguments = std::make_shared<BenchArguments<bench::AttentionOptions>>();
  bench::AttentionOptions& options = arguments->options;
  attention->add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  attention->add_option("--dtype", options.dtype,
                        "float32, float64, bfloat16 or float16 (default: float32, on CUDA bfloat16)");
  attention
      ->add_option("--lengths", options.lengths, "Context lengths (default: 1024,2048,4096, on CUDA 4096,16384,65536)")
      ->delimiter(',');
  attention->add_option("--batch", options.batch, "Sequences (default: 1, on CUDA as many as make 32,768 tokens)")
      ->check(whole_number(1));
  attention->add_option("--heads", options.heads, "Heads (default: 4, on CUDA as many as make 1,536 channels)")
      ->check(whole_number(1));
  attention->add_option("--head-dim", options.head_dim, "Head dimension")
      ->check(whole_number(1))
      ->capture_default_str();
  attention->add_flag("--prune,!--no-prune", options.prune, "Also measure adaptive pruning (on unless --no-prune)");
  attention
      ->add_option("--seconds", options.seconds,
                   "Measure each length for so long, but between 5 and 100 rounds of one turn each")
      ->check(positive_number())
      ->capture_default_str();
  attention->add_option("--repetitions", options.repetitions, "So many rounds instead, however long they take")
      ->check(whole_number(1));
  add_threads(*attention, options.threads);
  attention->add_flag("--json", arguments->json, "One JSON object a line");
  attention->footer(
      "Examples: fox bench attention --lengths 1024,4096 --json\n"
      "          fox bench attention --device cuda --head-dim 128");
  attention->callback([arguments] { run_attention(*arguments); });
}

/// "65536x8" as keys and sequences.
std::pair<int64_t, int64_t> parse_size(const std::string& text) {
  std::pair<int64_t, int64_t> size;
  char rest;
  if (std::sscanf(text.c_str(), "%ldx%ld%c", &size.first, &size.second, &rest) != 2) {
    throw UsageError("size '" + text + "' is not KEYSxSEQUENCES", "e.g. 65536x8");
  }
  return size;
}

void add_decode(CLI::App& command) {
  CLI::App* decode = command.add_subcommand(
      "decode", "One new query a sequence against a long cache, beside scaled_dot_product_attention (cuDNN's on CUDA)");
  auto arguments = std::make_shared<BenchArguments<bench::DecodeOptions>>();
  auto sizes = std::make_shared<std::vector<std::string>>();
  bench::DecodeOptions& options = arguments->options;
  decode->add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  decode->add_option("--dtype", options.dtype,
                     "bfloat16, float16, on the CPU also float32 (default: float32, on CUDA bfloat16)");
  decode->add_option("--sizes", *sizes, "KEYSxSEQUENCES (default: 1024x2, on CUDA 65536x1,65536x8,16384x32)")
      ->delimiter(',');
  decode->add_option("--heads", options.heads, "Heads (default: as many as make 1,536 channels)")
      ->check(whole_number(1));
  decode->add_option("--head-dim", options.head_dim, "Head dimension")->check(whole_number(1))->capture_default_str();
  decode->add_option("--repetitions", options.repetitions, "Turns that count")
      ->check(whole_number(1))
      ->capture_default_str();
  decode->add_flag("--json", arguments->json, "One JSON object a line");
  decode->footer("Example: fox bench decode --device cuda --sizes 65536x8 --json");
  decode->callback([arguments, sizes] {
    for (const auto& size : *sizes) arguments->options.sizes.push_back(parse_size(size));
    run_decode(*arguments);
  });
}

}  // namespace

void register_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Measure operators against torch's, and training steps");
  command->require_subcommand(1);
  add_attention(*command);
  add_decode(*command);
  register_bench_elementwise(*command);
  register_bench_train(*command);
  register_bench_mixers(*command);
  register_bench_loader(*command);
}

}  // namespace fox::cli
