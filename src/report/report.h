#pragma once

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <vector>

namespace fox::report {

struct ReportOptions {
  std::string title = "Forgetting Transformer: what was trained, and what it shows";
  std::filesystem::path notes;  ///< optional text file: each paragraph is shown under "Read this before the numbers"
};

/// Everything the page shows of one run directory (docs/formats.md): name, run.json, metrics.jsonl, and what is there
/// of eval/*.json. Throws fox::Error naming the file that is missing or does not parse; evaluations may be missing.
nlohmann::json collect_run(const std::filesystem::path& run_dir);

/// Writes one self-contained HTML page that compares the runs: no request leaves it, plotly.js is inlined once.
void write_report(std::span<const std::filesystem::path> run_dirs, const std::filesystem::path& out,
                  const ReportOptions& options = {});

}  // namespace fox::report
