#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>

#include "bench/train.h"
#include "cli/commands.h"
#include "cli/shared_options.h"
#include "config/published_models.h"
#include "dist/launch.h"

namespace fox::cli {
namespace {

struct BenchTrainArguments {
  bench::TrainOptions options;
  bool json = false;
};

void run(const BenchTrainArguments& arguments) {
  bench::TrainOptions options = arguments.options;
  options.launch = dist::read_launch().value_or(dist::Launch{});
  const auto measurement = bench::bench_train(options);
  if (options.launch.rank > 0) return;
  fmt::print("{}", arguments.json ? bench::to_json(measurement) + "\n" : bench::describe(measurement));
}

}  // namespace

void register_bench_train(CLI::App& bench) {
  auto arguments = std::make_shared<BenchTrainArguments>();
  bench::TrainOptions& x = arguments->options;
  CLI::App* command =
      bench.add_subcommand("train", "Whole training steps of a published model, and where the time goes");
  command
      ->add_option("--model", x.model,
                   fmt::format("{}; or a size, which means fox_pro", fmt::join(published_models(), ", ")))
      ->capture_default_str();
  command->add_option("--size", x.size, fmt::format("{}", fmt::join(published_sizes(), ", ")))->capture_default_str();
  command->add_option("--length", x.length, "Context length")->check(whole_number(1))->capture_default_str();
  command->add_option("--batch", x.batch, "Sequences a micro-batch")->check(whole_number(1))->capture_default_str();
  command->add_option("--micro-batches", x.micro_batches, "Micro-batches a step")
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_option("--sequence-ranks", x.sequence_ranks, "So many ranks hold their sequences together")
      ->check(whole_number(1))
      ->capture_default_str();
  command
      ->add_option("--gates", x.gates,
                   "dense (as published), or log_spaced: decay times from 8 to 65,536 tokens over heads")
      ->capture_default_str();
  command->add_flag("--prune", x.prune, "Adaptive pruning, tolerance e^-10");
  command->add_option("--activation-checkpointing", x.activation_checkpointing, "none, mlp or full")
      ->capture_default_str();
  command->add_option("--cuda-graph", x.cuda_graph, "Repeat the step as a CUDA graph (one GPU): auto, on or off")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  command->add_option("--precision", x.precision, "bf16 (float32 masters), float32 or float64")->capture_default_str();
  command->add_option("--device", x.device, "cpu, cuda or cuda:N")->capture_default_str();
  command->add_option("--steps", x.steps, "Steps that are timed")->check(whole_number(1))->capture_default_str();
  command->add_option("--warm-up", x.warm_up, "Steps before them")->check(whole_number(1))->capture_default_str();
  add_threads(*command, x.threads);
  command->add_option("--trace", x.trace, "Write a trace of the profiled steps here (chrome://tracing)");
  command->add_flag("--json", arguments->json, "One JSON object on a line");
  command->footer(
      "Examples: fox bench train --device cuda --size 760m --length 16384 --gates log_spaced --prune --json\n"
      "          fox bench train --size tiny --length 256\n"
      "          torchrun --no-python --standalone --nproc-per-node 2 fox bench train --device cuda --size 760m "
      "--json");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
