#pragma once

#include <filesystem>
#include <vector>

namespace fox::data {

/// JSON lines: one object a line, whose "text" is a document (*.jsonl, *.jsonl.zst). Any other file is one document.
bool is_json_lines(const std::filesystem::path& file);
/// Compressed with Zstandard (*.jsonl.zst).
bool is_compressed(const std::filesystem::path& file);

/// The files of a corpus: those named, and those found in folders (*.txt, *.jsonl, *.jsonl.zst; sorted by path, links
/// to folders followed). Throws Error for a source that is missing or a folder that holds none.
std::vector<std::filesystem::path> find_text_files(const std::vector<std::filesystem::path>& sources);

}  // namespace fox::data
