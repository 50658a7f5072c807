#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <utility>

#include "bench/attention.h"
#include "cli/commands.h"

namespace fox::cli {
namespace {

struct Arguments {
  bench::AttentionOptions options;
  bool json = false;
};

void run(const Arguments& arguments) {
  bool headed = arguments.json;  // the head waits for the first line: a device that is not there prints an error alone
  bench::bench_attention(arguments.options, [&](const bench::AttentionMeasurement& line) {
    if (!std::exchange(headed, true)) fmt::print("{}\n", bench::table_head());
    fmt::print("{}\n", arguments.json ? bench::to_json(line) : bench::table_row(line));
    std::fflush(stdout);
  });
  if (!arguments.json) fmt::print("\nratio: speed relative to sdpa (causal, no bias) in the same direction\n");
}

}  // namespace

void register_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Measure operators against torch's, in turns in one process");
  command->require_subcommand(1);
  CLI::App* attention = command->add_subcommand(
      "attention", "Forgetting attention against scaled_dot_product_attention, without bias and with a float mask");
  auto arguments = std::make_shared<Arguments>();
  bench::AttentionOptions& options = arguments->options;
  attention->add_option("--device", options.device, "cpu, cuda or cuda:N")->capture_default_str();
  attention->add_option("--dtype", options.dtype, "float32, float64, bfloat16 or float16")->capture_default_str();
  attention->add_option("--lengths", options.lengths, "Context lengths")->delimiter(',')->capture_default_str();
  attention->add_option("--batch", options.batch, "Sequences")->check(CLI::PositiveNumber)->capture_default_str();
  attention->add_option("--heads", options.heads, "Heads")->check(CLI::PositiveNumber)->capture_default_str();
  attention->add_option("--head-dim", options.head_dim, "Head dimension")->capture_default_str();
  attention->add_flag("--prune,!--no-prune", options.prune, "Also measure adaptive pruning (on unless --no-prune)");
  attention->add_option("--repetitions", options.repetitions, "Turns that count")->capture_default_str();
  attention->add_option("--threads", options.threads, "CPU threads (0: one a core)")->capture_default_str();
  attention->add_flag("--json", arguments->json, "One JSON object a line");
  attention->footer("Example: fox bench attention --lengths 1024,4096 --json");
  attention->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
