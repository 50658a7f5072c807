#include "data/corpus_files.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"

namespace fox::data {

namespace fs = std::filesystem;

namespace {

constexpr const char* kHint = "name files of text or of JSON lines, or folders of *.txt, *.jsonl or *.jsonl.zst files";

bool is_text(const fs::path& file) { return file.extension() == ".txt" || is_json_lines(file); }

}  // namespace

bool is_compressed(const fs::path& file) { return file.string().ends_with(".jsonl.zst"); }
bool is_json_lines(const fs::path& file) { return file.extension() == ".jsonl" || is_compressed(file); }

std::vector<fs::path> find_text_files(const std::vector<fs::path>& sources) {
  std::vector<fs::path> files;
  for (const fs::path& source : sources) {
    if (!fs::exists(source)) throw Error(fmt::format("there is no {}", source.string()), kHint);
    if (!fs::is_directory(source)) {
      files.push_back(source);
      continue;
    }
    std::vector<fs::path> found;
    for (const auto& entry :
         fs::recursive_directory_iterator(source, fs::directory_options::follow_directory_symlink)) {
      if (entry.is_regular_file() && is_text(entry.path())) found.push_back(entry.path());
    }
    if (found.empty()) throw Error(fmt::format("{} holds no *.txt or *.jsonl file", source.string()), kHint);
    std::sort(found.begin(), found.end());
    files.insert(files.end(), found.begin(), found.end());
  }
  if (files.empty()) throw Error("no text to read", kHint);
  return files;
}

}  // namespace fox::data
