#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "bench/mixers.h"
#include "cli/commands.h"
#include "cli/shared_options.h"

namespace fox::cli {
namespace {

struct BenchMixersArguments {
  bench::MixersOptions options;
  bool json = false;
};

void run(const BenchMixersArguments& arguments) {
  bool headed = arguments.json;  // the head waits for the first line: a device that is not there prints an error alone
  bench::bench_mixers(arguments.options, [&](const bench::MixersMeasurement& line) {
    if (!std::exchange(headed, true)) fmt::print("{}\n", bench::mixers_table_head());
    fmt::print("{}\n", arguments.json ? bench::to_json(line) : bench::table_row(line));
    std::fflush(stdout);
  });
  if (!arguments.json) fmt::print("\nratio: GFLOP/s relative to at::matmul on the shapes of the chunked form (CPU)\n");
}

}  // namespace

void register_bench_mixers(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "mixers", "Every sequence mixer at equal width over the context's length, and its decoding step");
  auto arguments = std::make_shared<BenchMixersArguments>();
  bench::MixersOptions& options = arguments->options;
  command->add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  command->add_option("--dtype", options.dtype,
                      "float32, float64, bfloat16 or float16 (default: float32, on CUDA bfloat16)");
  command
      ->add_option("--lengths", options.lengths,
                   "Context lengths (default: 512,1024,2048, on CUDA 2048,8192,32768,65536)")
      ->delimiter(',');
  command
      ->add_option("--positions", options.positions,
                   "Contexts behind a decoding step (default: 64,1024, on CUDA 1024,16384,65536)")
      ->delimiter(',');
  command
      ->add_option("--tokens", options.tokens,
                   "Tokens of a call: as many sequences as make so many (default: 2048, on CUDA 65536)")
      ->check(whole_number(1));
  command->add_option("--width", options.width, "Channels, a multiple of 128 (default: 256, on CUDA 1536)")
      ->check(whole_number(1));
  command->add_option("--repetitions", options.repetitions, "Turns that count")
      ->check(whole_number(1))
      ->capture_default_str();
  add_threads(*command, options.threads);
  command->add_flag("--json", arguments->json, "One JSON object a line");
  command->footer("Example: fox bench mixers --lengths 512,4096 --json");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
