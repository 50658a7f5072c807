#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/shared_options.h"
#include "eval/run_evaluation.h"

namespace fox::cli {
namespace {

using nlohmann::json;

struct EvalArguments {
  std::vector<std::string> dirs, data;
  std::string out;
  eval::RunEvaluationOptions options;
  ComputeOptions compute;
  bool json = false;

  std::vector<std::filesystem::path> data_paths() const { return {data.begin(), data.end()}; }
};

struct Row {
  std::string name;
  json loss;  // as eval/loss.json
};

std::string number(const json& value, const char* format) {
  return value.is_number() ? fmt::format(fmt::runtime(format), value.get<double>()) : "–";
}

/// One line a model and one column a position bin, of what `field` names.
void print_bins(const std::vector<Row>& rows, const std::string& title, const char* field, const char* format,
                const char* error_field = nullptr) {
  size_t width = title.size();
  for (const Row& row : rows) width = std::max(width, row.name.size());
  fmt::print("\n{:<{}}", title, width);
  for (const json& bin : rows.front().loss["per_token"]["bins"]) {
    fmt::print(" {:>15}", fmt::format("{}-{}", bin["begin"].get<int64_t>(), bin["end"].get<int64_t>()));
  }
  fmt::print("\n");
  for (const Row& row : rows) {
    fmt::print("{:<{}}", row.name, width);
    for (const json& bin : row.loss["per_token"]["bins"]) {
      const std::string error = error_field ? " ± " + number(bin[error_field], "{:.3f}") : "";
      // fmt counts code points, so "±" and "–" do not disturb the columns.
      fmt::print(" {:>15}", number(bin[field], format) + error);
    }
    fmt::print("\n");
  }
}

bool any_bin_has(const std::vector<Row>& rows, const char* field) {
  for (const Row& row : rows) {
    for (const json& bin : row.loss["per_token"]["bins"]) {
      if (bin[field].is_number()) return true;
    }
  }
  return false;
}

void print_tables(const std::vector<Row>& rows) {
  const json& first = rows.front().loss["per_token"];
  fmt::print("{} held-out tokens, windows of {}", first["tokens"].get<int64_t>(), first["length"].get<int64_t>());
  if (first["paired"].get<bool>()) {
    fmt::print(" that start every {}: each column averages the same tokens", first["stride"].get<int64_t>());
  }
  fmt::print("\n");
  print_bins(rows, "loss (nats a token) at positions", "loss", "{:.3f}", "loss_error");
  if (any_bin_has(rows, "difference")) {
    print_bins(rows, "difference to the end of training length", "difference", "{:+.3f}", "difference_error");
  }
  if (any_bin_has(rows, "first_word_accuracy")) {
    print_bins(rows, "accuracy on first words of lines", "first_word_accuracy", "{:.2f}");
  }
  fmt::print("\nover windows of {} tokens that do not overlap:\n",
             rows.front().loss["held_out"]["context"].get<int64_t>());
  for (const Row& row : rows) {
    const json& held_out = row.loss["held_out"];
    fmt::print("  {}: {} bits a byte, perplexity {}, loss {} ({} tokens)\n", row.name,
               number(held_out["bits_per_byte"], "{:.3f}"), number(held_out["perplexity"], "{:.2f}"),
               number(held_out["loss"], "{:.3f}"), held_out["tokens"].get<int64_t>());
  }
}

void run_loss(EvalArguments& arguments) {
  check_out(arguments.out);
  arguments.compute.apply();
  infer::LoadedModel loaded = arguments.compute.load(arguments.dirs.front());
  const eval::HeldOutText text(loaded, arguments.data_paths());
  eval::default_loss_options(loaded.location, arguments.options.loss);
  const json loss = eval::evaluate_loss(loaded, text, arguments.options.loss);
  if (!arguments.out.empty()) write_file_atomically(arguments.out, loss.dump() + "\n");
  if (arguments.json) {
    fmt::print("{}\n", loss.dump());
  } else {
    print_tables({{arguments.dirs.front(), loss}});
  }
}

void run_report_files(EvalArguments& arguments) {
  arguments.compute.apply();
  arguments.options.data = arguments.data_paths();
  arguments.options.device = arguments.compute.device();
  arguments.options.compute = arguments.compute.compute();
  for (const std::string& dir : arguments.dirs) eval::check_evaluation(infer::locate_model(dir), arguments.options);
  std::vector<Row> rows;
  json all = json::object();
  for (const std::string& dir : arguments.dirs) {
    fmt::print(stderr, "evaluating {}\n", dir);
    const eval::RunEvaluation made = eval::evaluate_run(dir, arguments.options);
    rows.push_back({dir, made.loss});
    all[dir] = {{"loss", made.loss}, {"gates", made.gates}, {"samples", made.samples}};
  }
  if (arguments.json) {
    fmt::print("{}\n", all.dump(-1, ' ', false, json::error_handler_t::replace));
    return;
  }
  print_tables(rows);
  for (const Row& row : rows) {
    fmt::print("\n{}, samples (the prompt, then | and what the model writes):\n", row.name);
    for (const json& sample : all[row.name]["samples"]["samples"]) {
      fmt::print("{}|{}\n", sample["prompt"].get<std::string>(), sample["text"].get<std::string>());
    }
  }
}

void add_loss_options(CLI::App& command, eval::PerTokenLossOptions& options) {
  command.add_option("--length", options.length, "Tokens a window (default: 4 x the training length)")
      ->check(whole_number(1));
  command
      .add_option("--stride", options.stride,
                  "A window starts every so many tokens (default: 32). Below the length, every position range averages "
                  "the same tokens; equal to it, windows do not overlap")
      ->check(whole_number(1));
  command
      .add_option("--max-tokens", options.max_tokens,
                  "Held-out tokens that count (0: all); each costs length / stride forward tokens")
      ->check(whole_number(0))
      ->capture_default_str();
  command.add_flag("--first-word", options.first_word,
                   "Also measure accuracy on first words of lines (from a line start to the first space)");
}

void register_loss(CLI::App& eval_command) {
  auto arguments = std::make_shared<EvalArguments>();
  arguments->options.loss.max_tokens = 20000;
  CLI::App* command = eval_command.add_subcommand(
      "loss", "Loss at each position of a context, within and beyond the training length; perplexity; bits a byte");
  command->add_option("DIR", arguments->dirs, kModelHelp)->required()->expected(1);
  command->add_option("--data", arguments->data,
                      "Text files, folders or a token store (default: the run's held-out text)");
  add_loss_options(*command, arguments->options.loss);
  command->add_option("--out,-o", arguments->out,
                      "Also write the JSON, with L(i) and P(l) of every position, to this file");
  command->add_flag("--json", arguments->json, "Print JSON instead of tables");
  arguments->compute.add_to(*command);
  command->footer(
      "Example: fox eval loss runs/demo/fox_pro --first-word --out loss.json\n"
      "         fox eval loss MODEL --data book.txt --length 8192 --stride 8192 --max-tokens 0");
  command->callback([arguments] { run_loss(*arguments); });
}

void register_run(CLI::App& eval_command) {
  auto arguments = std::make_shared<EvalArguments>();
  eval::RunEvaluationOptions& options = arguments->options;
  options.loss.max_tokens = 20000;
  options.gates = {.windows = 4, .num_maps = 8};
  options.samples.sampling.temperature = 0.8;
  options.samples.max_tokens = 200;
  CLI::App* command = eval_command.add_subcommand(
      "run", "All that `fox report` shows of runs: per-token loss, gates and samples, written to DIR/eval");
  command->add_option("DIR", arguments->dirs, "Run directories, compared in one table")->required();
  command->add_option("--data", arguments->data,
                      "Text files, folders or a token store (default: the run's held-out text)");
  add_loss_options(*command, options.loss);
  command->add_option("--maps", options.gates.num_maps, "Heads whose forget and attention matrices are kept")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--prompt", options.prompts, "Texts to continue (default: the first line of the held-out text)")
      ->take_all();
  command->add_option("--sample-tokens", options.samples.max_tokens, "Tokens a sample")
      ->check(whole_number(0))
      ->capture_default_str();
  command->add_option("--temperature", options.samples.sampling.temperature, "Of samples")->capture_default_str();
  command->add_option("--seed", options.samples.sampling.seed, "Of samples")->capture_default_str();
  command->add_flag("--force", options.force, "Evaluate again even where nothing has changed");
  command->add_flag("--json", arguments->json, "Print JSON instead of tables");
  arguments->compute.add_to(*command);
  command->footer("Example: fox eval run runs/demo/fox_pro runs/demo/transformer_llama --first-word");
  command->callback([arguments] { run_report_files(*arguments); });
}

}  // namespace

void register_eval(CLI::App& app) {
  CLI::App* command = app.add_subcommand("eval", "Measure a model on text it has not seen");
  command->require_subcommand(1);
  command->footer("Example: fox eval loss runs/demo/fox_pro");
  register_loss(*command);
  register_run(*command);
}

}  // namespace fox::cli
