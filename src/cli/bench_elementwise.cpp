#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "bench/elementwise.h"
#include "cli/commands.h"
#include "cli/shared_options.h"

namespace fox::cli {
namespace {

struct BenchElementwiseArguments {
  bench::ElementwiseOptions options;
  bool json = false;
};

void run(const BenchElementwiseArguments& arguments) {
  bool headed = arguments.json;  // the head waits for the first line: a device that is not there prints an error alone
  bench::bench_elementwise(arguments.options, [&](const bench::ElementwiseMeasurement& line) {
    if (!std::exchange(headed, true)) fmt::print("{}\n", bench::elementwise_table_head());
    fmt::print("{}\n", arguments.json ? bench::to_json(line) : bench::elementwise_table_row(line));
    std::fflush(stdout);
  });
  if (!arguments.json)
    fmt::print("\nratio: bandwidth (each input and output once) relative to a copy of as many bytes\n");
}

}  // namespace

void register_bench_elementwise(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand(
      "elementwise", "The memory-bound operators against a copy of as many bytes, and the LM head with its loss");
  auto arguments = std::make_shared<BenchElementwiseArguments>();
  bench::ElementwiseOptions& options = arguments->options;
  command->add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  command->add_option("--dtype", options.dtype,
                      "float32, float64, bfloat16 or float16 (default: float32, on CUDA bfloat16)");
  command->add_option("--rows", options.rows, "Tokens (default: 4096, on CUDA 65536,16384)")->delimiter(',');
  command->add_option("--widths", options.widths, "Channels (default: 768, on CUDA 768,1024,1536)")->delimiter(',');
  command->add_option("--head-dim", options.head_dim, "Head dimension")->check(whole_number(1))->capture_default_str();
  command->add_flag("--lm-head,!--no-lm-head", options.lm_head, "Also measure the LM head (on unless --no-lm-head)");
  command->add_option("--vocab", options.vocab, "Vocabulary of the LM head (default: 4096, on CUDA 50304)");
  command->add_option("--repetitions", options.repetitions, "Turns that count")
      ->check(whole_number(1))
      ->capture_default_str();
  add_threads(*command, options.threads);
  command->add_flag("--json", arguments->json, "One JSON object a line");
  command->footer("Example: fox bench elementwise --device cuda --widths 1536");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
