#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "report/report.h"

namespace fox::cli {

void register_report(CLI::App& app) {
  struct ReportArguments {
    std::vector<std::string> runs;
    std::string out = "report.html", notes;
    report::ReportOptions options;
  };
  auto arguments = std::make_shared<ReportArguments>();
  CLI::App* command =
      app.add_subcommand("report", "Write one HTML page that compares runs: curves, per-token loss, gates, samples");
  command->add_option("RUN", arguments->runs, "Run directories, in the order they are shown")->required();
  command->add_option("--out,-o", arguments->out, "The page")->capture_default_str();
  command->add_option("--title", arguments->options.title, "Its heading")->capture_default_str();
  command->add_option("--notes", arguments->notes, "Text file; its paragraphs are shown above the numbers");
  command->footer(
      "The page holds all it needs and opens with the network off. Evaluate the runs first (fox eval run).\n"
      "Example: fox report runs/demo/fox_pro runs/demo/transformer_llama --out runs/demo/report.html");
  command->callback([arguments] {
    arguments->options.notes = arguments->notes;
    const std::vector<std::filesystem::path> runs(arguments->runs.begin(), arguments->runs.end());
    report::write_report(runs, arguments->out, arguments->options);
    for (const auto& run : runs) {
      if (std::filesystem::exists(run / "eval" / "loss.json")) continue;
      fmt::print(stderr, "warning: {} has not been evaluated, so little is shown of it; first: fox eval run {}\n",
                 run.string(), run.string());
    }
    fmt::print("wrote {}\n", arguments->out);
  });
}

}  // namespace fox::cli
