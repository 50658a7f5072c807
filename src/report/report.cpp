#include "report/report.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/files.h"
#include "base/version.h"

extern "C" {
// Put into the library by fox_embed (cmake/embed.cmake).
extern const char fox_embedded_plotly[], fox_embedded_page_html[], fox_embedded_page_js[];
extern const size_t fox_embedded_plotly_size, fox_embedded_page_html_size, fox_embedded_page_js_size;
}

namespace fox::report {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

json parse(const fs::path& path, const std::string& text) {
  json value = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) {
    throw Error(fmt::format("{}: not valid JSON", path.string()), "evaluate the run again to write it anew");
  }
  return value;
}

json read_lines(const fs::path& path) {
  json lines = json::array();
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) {
    if (!line.empty()) lines.push_back(parse(path, line));
  }
  return lines;
}

// JSON inside <script> must not close it: "</" is the only way to, and "<\/" means the same to a JSON reader.
std::string for_script(const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  for (size_t at = 0; (at = text.find("</", at)) != std::string::npos; at += 3) text.replace(at, 2, "<\\/");
  return text;
}

// The template with each `@name@` of `fills` replaced, in one pass: what is filled in may itself hold marks.
std::string fill(std::string_view text, const std::vector<std::pair<std::string_view, std::string_view>>& fills) {
  std::string page;
  for (const auto& [mark, with] : fills) {
    const size_t at = text.find(mark);
    page.append(text.substr(0, at)).append(with);
    text.remove_prefix(at + mark.size());
  }
  return page.append(text);
}

json read_notes(const fs::path& path) {
  json paragraphs = json::array();
  std::istringstream text(read_file(path));
  std::string paragraph;
  for (std::string line; std::getline(text, line);) {
    if (line.starts_with("#")) continue;
    if (line.empty() && !paragraph.empty()) paragraphs.push_back(std::exchange(paragraph, ""));
    if (!line.empty()) paragraph += (paragraph.empty() ? "" : " ") + line;
  }
  if (!paragraph.empty()) paragraphs.push_back(paragraph);
  return paragraphs;
}

}  // namespace

json collect_run(const fs::path& run_dir) {
  if (!fs::exists(run_dir / "run.json")) {
    throw Error(fmt::format("{}: not a run directory (no run.json)", run_dir.string()),
                "name the [output] dir of a run that `fox train` made");
  }
  const fs::path dir = fs::weakly_canonical(run_dir);
  json run{{"name", dir.filename().string()},
           {"run", parse(dir / "run.json", read_file(dir / "run.json"))},
           {"metrics", fs::exists(dir / "metrics.jsonl") ? read_lines(dir / "metrics.jsonl") : json::array()}};
  for (const char* part : {"loss", "gates", "samples"}) {
    const fs::path path = dir / "eval" / (std::string(part) + ".json");
    if (fs::exists(path)) run[part] = parse(path, read_file(path));
  }
  return run;
}

void write_report(std::span<const fs::path> run_dirs, const fs::path& out, const ReportOptions& options) {
  json data{{"title", options.title}, {"version", version()}, {"commit", commit()}, {"runs", json::array()}};
  for (const auto& dir : run_dirs) data["runs"].push_back(collect_run(dir));
  if (!options.notes.empty()) data["notes"] = read_notes(options.notes);

  const std::string json_text = for_script(data);
  const std::string page = fill({fox_embedded_page_html, fox_embedded_page_html_size},
                                {{"@data@", json_text},
                                 {"@plotly@", {fox_embedded_plotly, fox_embedded_plotly_size}},
                                 {"@script@", {fox_embedded_page_js, fox_embedded_page_js_size}}});
  write_file_atomically(out, page);
}

}  // namespace fox::report
