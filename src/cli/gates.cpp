#include "eval/gates.h"

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "cli/commands.h"
#include "cli/shared_options.h"
#include "eval/run_evaluation.h"

namespace fox::cli {
namespace {

struct GatesArguments {
  std::string dir;
  std::vector<std::string> data;
  std::string out;
  eval::GateOptions options{.windows = 4};
  ComputeOptions compute;
  bool json = false;
};

void print_table(const eval::GateAnalysis& analysis) {
  fmt::print("{:>5} {:>5} {:>10} {:>15} {:>9}\n", "layer", "head", "mean gate", "memory (tokens)", "skipped");
  double skipped = 0;
  for (const eval::HeadGates& head : analysis.heads) {
    fmt::print("{:>5} {:>5} {:>10.4f} {:>15} {:>8.1f}%\n", head.layer, head.head, head.mean_gate,
               head.memory_length ? fmt::format("{:.1f}", *head.memory_length) : "unlimited",
               100 * head.skipped_share.value_or(0));
    skipped += head.skipped_share.value_or(0) / static_cast<double>(analysis.heads.size());
  }
  fmt::print(
      "\nOver {} windows of {} tokens. Memory: 1 / (-mean ln f). Skipped: causal 64x64 blocks that pruning with "
      "ln(tolerance) {} leaves out;\nall heads together {:.1f}%, and at most {:.1f}% can be.\n",
      analysis.windows, analysis.length, analysis.log_pruning_tolerance, 100 * skipped, 100 * analysis.most_skippable);
}

void run(GatesArguments arguments) {
  check_out(arguments.out);
  arguments.compute.apply();
  infer::LoadedModel loaded = arguments.compute.load(arguments.dir);
  const eval::HeldOutText text(loaded, {arguments.data.begin(), arguments.data.end()});
  if (arguments.options.length == 0) {
    eval::PerTokenLossOptions lengths;
    eval::default_loss_options(loaded.location, lengths);
    arguments.options.length = lengths.length;
  }
  const eval::GateAnalysis analysis =
      eval::analyse_gates(loaded.model, text.store(), loaded.tokenizer, arguments.options);
  const std::string json = eval::to_json(analysis).dump();
  if (!arguments.out.empty()) write_file_atomically(arguments.out, json + "\n");
  if (arguments.json) {
    fmt::print("{}\n", json);
    return;
  }
  if (!analysis.has_gates) {
    throw Error(
        fmt::format("the model in {} has no forget gates ({})", arguments.dir, loaded.model.config().model_type),
        "`fox gates` is for Forgetting Transformers; --json --maps N prints N attention maps of any model that "
        "attends");
  }
  print_table(analysis);
}

}  // namespace

void register_gates(CLI::App& app) {
  auto arguments = std::make_shared<GatesArguments>();
  eval::GateOptions& options = arguments->options;
  CLI::App* command = app.add_subcommand("gates", "What each head's forget gate remembers, measured on held-out text");
  command->add_option("DIR", arguments->dir, kModelHelp)->required();
  command->add_option("--data", arguments->data, "Text files or folders to read (default: the run's held-out text)");
  command->add_option("--length", options.length, "Tokens a window (default: 4 x the training length)")
      ->check(whole_number(1));
  command->add_option("--windows", options.windows, "Windows to average")
      ->check(whole_number(1))
      ->capture_default_str();
  command
      ->add_option("--log-tolerance", options.log_pruning_tolerance,
                   "ln of the attention weight a row that pruning may drop")
      ->capture_default_str();
  command->add_option("--maps", options.num_maps, "Heads whose forget and attention matrices go into the JSON")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--map-size", options.map_size, "Rows of those matrices at most")
      ->check(whole_number(1))
      ->capture_default_str();
  command->add_option("--out,-o", arguments->out, "Also write the JSON to this file");
  command->add_flag("--json", arguments->json, "Print JSON instead of a table");
  arguments->compute.add_to(*command);
  command->footer("Example: fox gates runs/demo/fox_pro --windows 8");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace fox::cli
