#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/interrupt.h"
#include "cli/commands.h"
#include "config/run_config.h"
#include "dist/launch.h"
#include "train/dry_run.h"
#include "train/run.h"

namespace fox::cli {
namespace {

struct TrainArguments {
  std::string file;
  std::vector<std::string> set;
  std::optional<std::string> init_from, device, threads, seed;  // as written, for messages
  bool print_config = false, dry_run = false;
};

RunConfig load(const TrainArguments& arguments) {
  std::vector<std::string> overrides = arguments.set;
  if (arguments.device) overrides.push_back("train.device=" + *arguments.device);
  if (arguments.threads) overrides.push_back("train.threads=" + *arguments.threads);
  if (arguments.seed) overrides.push_back("train.seed=" + *arguments.seed);
  return RunConfig::load(arguments.file, overrides);
}

void train(const RunConfig& config, train::RunOptions options) {
  catch_interrupts();
  options.on_begin = [](const RunConfig& complete) { fmt::print(stderr, "{}\n", complete.to_toml()); };
  const train::RunOutcome outcome = train::run_training(config, options);
  const bool talks = options.launch.rank == 0;
  const std::string& dir = config.output.dir;
  switch (outcome) {
    case train::RunOutcome::kFinished:
      if (talks) fmt::print(stderr, "finished: the model is in {} (try: fox generate {})\n", dir, dir);
      return;
    case train::RunOutcome::kAlreadyFinished:
      if (talks) fmt::print(stderr, "nothing to do: the run in {} is finished\n", dir);
      return;
    case train::RunOutcome::kInterrupted:
      if (talks) fmt::print(stderr, "stopped; a checkpoint is saved, and the same command continues from it\n");
      throw CLI::RuntimeError(130);
  }
}

void run(const TrainArguments& arguments) {
  const RunConfig config = load(arguments);
  if (arguments.print_config) {
    fmt::print("{}", config.to_toml());
    return;
  }
  train::RunOptions options;
  options.launch = dist::read_launch().value_or(dist::Launch{});
  if (arguments.init_from) options.init_from = *arguments.init_from;
  if (arguments.dry_run) {
    if (options.launch.size > 1) throw UsageError("--dry-run measures one process", "call it without torchrun");
    fmt::print("{}", train::describe(train::dry_run(config, options.init_from)));
    return;
  }
  train(config, options);
}

}  // namespace

void register_train(CLI::App& app) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* command =
      app.add_subcommand("train", "Train a model as a run file says, or continue a run that was stopped");
  command->add_option("RUN.toml", arguments->file, "Run file: tables [model] [data] [train] [eval] [output]")
      ->required();
  command
      ->add_option("--set", arguments->set,
                   "table.key=value: replaces a setting of the file; may be given several times")
      ->expected(1)
      ->take_all();
  command->add_flag("--print-config", arguments->print_config, "Print every setting as a run file, and stop");
  command->add_flag("--dry-run", arguments->dry_run, "Estimate time, memory and disk from a few steps; writes nothing");
  command->add_option("--init-from", arguments->init_from,
                      "Start from the weights of this run or Hugging Face model directory");
  command->add_option("--device", arguments->device, "Short for --set train.device=…: cpu, cuda, cuda:1");
  command->add_option("--threads", arguments->threads, "Short for --set train.threads=…: CPU threads; 0: all cores")
      ->type_name("INT");
  command->add_option("--seed", arguments->seed, "Short for --set train.seed=…")->type_name("UINT");
  command->footer(
      "Example: fox train configs/demo/fox_pro.toml --set train.lr=2e-3 --set output.dir=runs/try\n"
      "The same command continues a run that was stopped (Ctrl-C saves a checkpoint first), bit for bit as if it had "
      "not\n"
      "been, given as many threads and ranks. A run directory keeps its configuration in run.toml and only accepts the "
      "same one\n"
      "again; output.*, data.cache, train.device, .threads, .max_bad_steps, .activation_checkpointing, "
      ".deterministic,\n"
      ".shard_optimizer, .rank_timeout_s, .sequence_ranks and .cuda_graph may change. On a GPU, bits are the same each "
      "time with\n"
      "--set train.deterministic=true (a few percent slower).\n"
      "Many GPUs: torchrun --no-python --standalone --nproc-per-node 4 fox train RUN.toml --device cuda\n"
      "The ranks share each step's contexts and a run directory; docs/training.md tells more.");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
