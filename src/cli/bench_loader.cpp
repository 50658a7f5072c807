#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "base/progress.h"
#include "bench/loader.h"
#include "cli/commands.h"
#include "cli/shared_options.h"

namespace fox::cli {
namespace {

struct BenchLoaderArguments {
  bench::LoaderOptions options;
  bool json = false;
};

void run(const BenchLoaderArguments& arguments) {
  bench::bench_loader(arguments.options, [&](const bench::LoaderMeasurement& line) {
    if (arguments.json) {
      fmt::print("{}\n", bench::to_json(line));
    } else {
      fmt::print("{:<12} {} tokens/s ({} threads, contexts of {})\n", line.format, human_count(line.tokens_per_s()),
                 line.threads, line.context);
    }
    std::fflush(stdout);
  });
}

}  // namespace

void register_bench_loader(CLI::App& bench) {
  CLI::App* command = bench.add_subcommand("loader", "How fast stored tokens become training batches");
  auto arguments = std::make_shared<BenchLoaderArguments>();
  bench::LoaderOptions& options = arguments->options;
  command->add_option("DIR", options.dir,
                      "A token store or an array of LongCrawl64 (default: one of each, made of random tokens)");
  command->add_option("--context", options.context, "Tokens a context")->check(whole_number(1))->capture_default_str();
  command->add_option("--batch-tokens", options.batch_tokens, "Tokens a batch")
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_option("--threads", options.threads, "Threads that make batches")
      ->check(whole_number(1, 4096))
      ->capture_default_str();
  command->add_option("--tokens", options.tokens, "Tokens a repetition")->check(whole_number(1))->capture_default_str();
  command->add_option("--repetitions", options.repetitions, "Repetitions that count")
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_flag("--json", arguments->json, "One JSON object a line");
  command->footer("Example: fox bench loader --threads 2 --json");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
